// The measuring loop on two or more contexts of this process, over requests that rotate.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/loop.h"
#include "tests/pair.h"

namespace kvxfer::test {

inline constexpr std::uint64_t seed = 11;
inline constexpr std::uint64_t piece_bytes = 2041;  // pieces begin and end anywhere in a word
inline constexpr std::uint64_t pieces_per_leg = 4;

inline Side other(Side side) { return side == Side::prefill ? Side::decode : Side::prefill; }

// A context, its one region, and what it runs the loop with.
struct Node {
  std::unique_ptr<Context> context;
  std::vector<std::shared_ptr<Peer>> peers;
  Region region;
  Regions regions;
  std::vector<LoopRequest> requests;
  LoopResult result;
  std::exception_ptr failed;

  void run(Side side, LoopSettings set) {
    set.side = side;
    set.seed = seed;
    if (set.stall_ns == 0) set.stall_ns = 20 * second;
    failed = nullptr;
    try {
      result = run_loop(*context, requests, regions, set);
    } catch (...) {
      failed = std::current_exception();
    }
  }
  void require_well() const {
    if (failed) std::rethrow_exception(failed);
  }
  // Words that are wrong in what this side has of a request.
  std::uint64_t wrong_words(std::size_t request, std::uint64_t epoch) const {
    std::uint64_t wrong = 0;
    for (const Leg& leg : requests[request].legs) wrong += verify(regions, leg.pieces, seed, epoch, 1).wrong_words;
    return wrong;
  }
};

// A hub on one side, and leaves on the other with a leg of every request each. The slots of the rotation share no
// memory. Regions are numbered as prefill counts its own, and decode its own: a node has one of them.
struct Rotation {
  Side hub_side;
  Node hub;
  std::vector<Node> leaves;

  explicit Rotation(std::uint32_t slots, const std::string& backend = "tcp", std::size_t leaf_count = 1,
                    Side side_of_hub = Side::prefill)
      : Rotation(slots, [&] { return find_backend(backend).open(token, {}); }, leaf_count, side_of_hub) {}
  Rotation(std::uint32_t slots, const Opener& opener, std::size_t leaf_count, Side side_of_hub)
      : hub_side(side_of_hub), leaves(leaf_count) {
    const std::uint64_t leaf_pieces = slots * pieces_per_leg;
    open(hub, opener, leaf_pieces * leaf_count * piece_bytes, 0, 1);
    const std::string endpoint = hub.context->listen("127.0.0.1", 0);
    for (std::uint32_t l = 0; l < leaf_count; ++l) {
      Node& leaf = leaves[l];
      open(leaf, opener, leaf_pieces * piece_bytes, l, leaf_count);
      together([&] { leaf.peers.push_back(leaf.context->connect(endpoint, soon())); },
               [&] { hub.peers.push_back(hub.context->accept(soon())); });
      leaf.peers[0]->import_keys(hub.context->export_keys({&hub.region, 1}));
      hub.peers[l]->import_keys(leaf.context->export_keys({&leaf.region, 1}));
    }
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      hub.requests.emplace_back();
      for (std::uint32_t l = 0; l < leaf_count; ++l) {
        leaves[l].requests.emplace_back();
        add_leg(slot, l, slots);
      }
    }
    if (hub_side == Side::prefill)
      fill(hub.regions, seed);
    else
      for (const Node& leaf : leaves) fill(leaf.regions, seed);
    for (const Node* node : nodes(Side::decode)) poison(node->region.address, node->region.bytes);
  }

  std::vector<const Node*> nodes(Side side) const {
    if (side == hub_side) return {&hub};
    std::vector<const Node*> all;
    for (const Node& leaf : leaves) all.push_back(&leaf);
    return all;
  }

  // All nodes at once.
  void start_and_wait(const LoopSettings& set) {
    std::vector<std::jthread> threads;
    for (Node& leaf : leaves) threads.emplace_back([&] { leaf.run(other(hub_side), set); });
    hub.run(hub_side, set);
  }
  void run(const LoopSettings& set) {
    start_and_wait(set);
    hub.require_well();
    for (const Node& leaf : leaves) leaf.require_well();
  }
  std::uint64_t wrong_epochs() const {
    std::uint64_t wrong = 0;
    for (const Side side : {Side::prefill, Side::decode})
      for (const Node* node : nodes(side)) wrong += node->result.wrong_epochs;
    return wrong;
  }
  // Decode has the request of that epoch; prefill has no epoch left anywhere.
  void check_data(std::uint64_t epoch) const {
    for (const Node* node : nodes(Side::decode)) CHECK_EQ(node->wrong_words(epoch % hub.requests.size(), epoch), 0U);
    for (const Node* node : nodes(Side::prefill))
      for (std::size_t slot = 0; slot < hub.requests.size(); ++slot) CHECK_EQ(node->wrong_words(slot, 0), 0U);
  }

 private:
  static void open(Node& node, const Opener& opener, std::uint64_t bytes, std::uint32_t number, std::size_t regions) {
    node.context = opener();
    node.region = node.context->allocate(bytes, MemoryKind::host, -1);
    node.regions.resize(regions);
    node.regions[number] = {node.region.address, bytes};
  }

  void add_leg(std::uint32_t slot, std::uint32_t l, std::uint32_t slots) {
    const std::uint64_t leaf_pieces = slots * pieces_per_leg;
    PlanPieces of_leaf;
    of_leaf.segments.clear();
    Pieces at_hub, at_leaf;
    for (std::uint64_t i = 0; i < pieces_per_leg; ++i) {
      const std::uint64_t here = (l * leaf_pieces + slot * pieces_per_leg + i) * piece_bytes;
      const std::uint64_t there = (leaf_pieces - 1 - (i * slots + slot)) * piece_bytes;
      of_leaf.segments.push_back(static_cast<std::uint32_t>(i));  // each piece is a segment of its own
      of_leaf.add(there, here, piece_bytes);
      const bool hub_is_source = hub_side == Side::prefill;
      for (Pieces* pieces : {&at_hub, &at_leaf}) {
        pieces->own_regions.push_back(pieces == &at_hub ? 0 : l);
        pieces->own_offsets.push_back(pieces == &at_hub ? here : there);
        pieces->source_regions.push_back(hub_is_source ? 0 : l);
        pieces->source_offsets.push_back(hub_is_source ? here : there);
        pieces->lengths.push_back(piece_bytes);
      }
    }
    Node& leaf = leaves[l];
    std::shared_ptr<Plan> hub_plan, leaf_plan;
    together([&] { hub_plan = prepare(hub, l, of_leaf.mirrored()); }, [&] { leaf_plan = prepare(leaf, 0, of_leaf); });
    hub.requests[slot].legs.push_back({hub.peers[l], hub_plan, at_hub});
    leaf.requests[slot].legs.push_back({leaf.peers[0], leaf_plan, at_leaf});
  }

  static std::shared_ptr<Plan> prepare(Node& node, std::size_t peer, const PlanPieces& pieces) {
    return node.context->prepare(*node.peers[peer], pieces.arrays(), soon());
  }
};

}  // namespace kvxfer::test
