// A context that says what it is told to, for what the loops make of it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "backend/request.h"

namespace kvxfer::test {

struct ScriptPeer final : Peer {
  std::uint32_t number;
  std::string why;
  explicit ScriptPeer(std::uint32_t id) : number(id) {}
  std::uint32_t id() const override { return number; }
  void import_keys(const std::string&) override {}
  std::vector<std::string> describe() const override { return {}; }
  std::string lost() const override { return why; }
};

struct ScriptPlan final : Plan {
  std::uint32_t peer;
  explicit ScriptPlan(std::uint32_t id) : peer(id) {}
  std::uint32_t peer_id() const override { return peer; }
  std::uint64_t bytes() const override { return 0; }
  std::uint32_t descriptors() const override { return 0; }
  std::uint32_t segments() const override { return 0; }
};

// Notes what the loop does ("post 0 1": peer, tag; "put back ..."), and lets it have one event after another.
class Script : public Context {
 public:
  std::vector<std::shared_ptr<ScriptPeer>> peers;
  std::deque<Event> events;
  std::vector<std::string> log;

  explicit Script(std::uint32_t count) {
    for (std::uint32_t id = 0; id < count; ++id) peers.push_back(std::make_shared<ScriptPeer>(id));
  }
  std::vector<LoopRequest> requests(std::size_t slots, std::size_t legs) const {
    std::vector<LoopRequest> all(slots);
    for (LoopRequest& request : all)
      for (std::uint32_t id = 0; id < legs; ++id)
        request.legs.push_back({peers[id], std::make_shared<ScriptPlan>(id), {}});
    return all;
  }
  void say(EventKind kind, std::uint32_t peer, std::uint64_t tag, Nanoseconds at = 0) {
    events.push_back({tag, kind, peer, at});
  }
  std::string take_log() {
    std::string text;
    for (const std::string& line : log) text += line + "; ";
    log.clear();
    return text;
  }

  void arm(Plan& plan, Op, std::span<const std::uint32_t>, std::uint64_t tag) override { note("arm", plan, tag); }
  void post(Plan& plan, Op, std::span<const std::uint32_t>, std::uint64_t tag, const ReadyFlag*) override {
    note("post", plan, tag);
  }
  void release(Peer& peer, std::uint64_t tag) override { note("release", peer.id(), tag); }
  std::size_t poll(std::span<Event> into, Deadline) override {
    if (events.empty()) return 0;
    into[0] = events.front();
    events.pop_front();
    return 1;
  }
  void put_back(std::span<const Event> back) override {
    for (const Event& event : back) note("put back", event.peer, event.tag);
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  Region allocate(std::uint64_t, MemoryKind, int) override { return {}; }
  Region register_memory(std::byte*, std::uint64_t, MemoryKind) override { return {}; }
  std::string listen(const std::string&, std::uint16_t) override { return {}; }
  std::shared_ptr<Peer> accept(Deadline) override { return nullptr; }
  std::shared_ptr<Peer> connect(const std::string&, Deadline) override { return nullptr; }
  std::string export_keys(std::span<const Region>) override { return {}; }
  std::shared_ptr<Plan> prepare(Peer&, const PlanArrays&, Deadline) override { return nullptr; }
  bool cancel(Peer&, std::uint64_t) override { return false; }
  void progress(Deadline) override {}
  int event_fd() override { return -1; }
  std::uint64_t bytes_moved() const override { return 0; }
  void close() noexcept override {}

 private:
  void note(const char* what, std::uint32_t peer, std::uint64_t tag) {
    log.push_back(std::string(what) + " " + std::to_string(peer) + " " + std::to_string(tag));
  }
  void note(const char* what, const Plan& plan, std::uint64_t tag) {
    note(what, dynamic_cast<const ScriptPlan&>(plan).peer, tag);
  }

  Capabilities capabilities_;
};

}  // namespace kvxfer::test
