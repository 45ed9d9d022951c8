#include "backends/shm/shm.h"

#include "backend/lane_context.h"
#include "backends/shm/peer.h"

namespace kvxfer::shm {

namespace {

// Of each peer. Measured with scattered 64 KiB pieces on 2 cores: two threads move 1.4 times what one does.
constexpr OptionBounds threads{"threads", 1, 64, 2};
constexpr std::size_t pieces_per_call = 64;

Capabilities abilities() {
  Capabilities c;
  c.one_sided = true;
  c.own_memory = true;
  c.max_inflight = max_inflight;
  c.push_confirmed_by = Confirms::target;
  c.backing = Backing::shared;
  return c;
}

class ShmContext final : public LaneContext {
 public:
  ShmContext(const Token& token, const Options& options)
      : LaneContext(abilities(), token, 1, Wire::local),
        effort_{static_cast<std::size_t>(option(options, threads)), pieces_per_call} {}
  ~ShmContext() override { LaneContext::close(); }  // the peers' threads use what is destroyed next

  Region register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) override {
    require_kind(kind);
    if (!pool_of(address, bytes))
      throw Error(Fault::usage,
                  "backend shm can register only memory that its own context allocated: other memory cannot be shown "
                  "to another process (backend cma can use any)");
    return LaneContext::register_memory(address, bytes, kind);
  }

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() != 1) throw Error(Fault::usage, "the peer opened data connections: it does not run backend shm");
    return std::make_shared<ShmPeer>(
        events, id, std::move(lanes), effort_, [this](std::uint32_t number) { return pool(number); }, mapped_);
  }
  RegionKey key(const Region& region) const override {
    const auto number = pool_of(region.address, region.bytes);
    if (!number) throw Error(Fault::usage, "a key is asked for of a region that this context does not have");
    const auto place = static_cast<std::uint64_t>(region.address - pool(*number)->address());
    return {region.id, *number, region.bytes, place};
  }

  const CopyPeer::Effort effort_;
  PeerPools mapped_;
};

}  // namespace

Probe probe() {
  Probe found = kernel_probe("memfd");
  try {
    const Mapping tried(1, Backing::shared);
    if (const std::string unfit = why_unfit(tried.descriptor(), tried.bytes()); !unfit.empty())
      throw Error(Fault::unavailable, unfit);
    const LaneListener listener(std::string(token_bytes, '\0'));
    found.available = true;
  } catch (const std::exception& error) {
    found.why_not = std::string(error.what()) + " (it takes memfd_create and Unix sockets, which Linux has since 3.17)";
  }
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  static constexpr OptionBounds known[] = {threads};
  refuse_unknown(options, known);
  return std::make_unique<ShmContext>(token, options);
}

}  // namespace kvxfer::shm
