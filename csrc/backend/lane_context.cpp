#include "backend/lane_context.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace kvxfer {

namespace {

constexpr std::size_t event_room = 8192;

Error closed_error() { return Error(Fault::usage, "the context is closed"); }

}  // namespace

LaneContext::LaneContext(Capabilities capabilities, std::string token, std::uint16_t lanes, Wire wire)
    : capabilities_(std::move(capabilities)),
      token_(std::move(token)),
      lane_count_(lanes),
      wire_(wire),
      events_(event_room),
      closing_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!closing_.open()) throw system_error(Fault::unavailable, "no event descriptor (eventfd)", errno);
}

LaneContext::~LaneContext() { LaneContext::close(); }

void LaneContext::require_open() const {
  const std::lock_guard lock(mutex_);
  if (closed_) throw closed_error();
}

void LaneContext::require_kind(MemoryKind kind) const {
  if (std::ranges::find(capabilities_.memory, kind) != capabilities_.memory.end()) return;
  std::string moved;
  for (const MemoryKind one : capabilities_.memory) moved += std::string(moved.empty() ? "" : " and ") + name_of(one);
  throw Error(Fault::unavailable, "this backend moves " + moved + " memory only");
}

void LaneContext::require_region(const std::byte* address, std::uint64_t bytes, MemoryKind kind) const {
  require_open();
  require_kind(kind);
  if (address == nullptr || bytes == 0) throw Error(Fault::usage, "a region needs an address and a size");
  if (bytes > UINTPTR_MAX - reinterpret_cast<std::uintptr_t>(address))
    throw Error(Fault::usage, "a region of " + std::to_string(bytes) + " bytes ends beyond the address space");
}

// Host memory: what backend moves other memory knows how to come by it.
Region LaneContext::allocate(std::uint64_t bytes, MemoryKind kind, int numa) {
  require_open();
  require_kind(kind);
  Mapping made(bytes, capabilities_.backing, numa);
  std::byte* const address = made.address();
  {
    const std::lock_guard lock(mutex_);
    mappings_.push_back(std::move(made));
  }
  return LaneContext::register_memory(address, bytes, kind);  // what more an engine does is for the registration proper
}

const Mapping* LaneContext::pool(std::uint32_t number) const {
  const std::lock_guard lock(mutex_);
  return number < mappings_.size() ? &mappings_[number] : nullptr;
}

std::optional<std::uint32_t> LaneContext::pool_of(const std::byte* address, std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t number = 0; number < mappings_.size(); ++number)
    if (mappings_[number].holds(address, bytes)) return number;
  return std::nullopt;
}

// Nothing here needs registration: a region is only remembered, to check descriptors against.
Region LaneContext::register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) {
  require_region(address, bytes, kind);
  regions_.push_back({static_cast<std::uint32_t>(regions_.size()), kind, address, bytes});
  return regions_.back();
}

std::string LaneContext::listen(const std::string& address, std::uint16_t port) {
  require_open();
  const auto listener = wire_ == Wire::local ? std::make_shared<LaneListener>(token_)
                                             : std::make_shared<LaneListener>(address, port, token_);
  const std::lock_guard lock(mutex_);
  if (closed_) throw closed_error();
  listener_ = listener;
  return listener->endpoint();
}

std::shared_ptr<Peer> LaneContext::accept(Deadline deadline) {
  require_open();
  std::shared_ptr<LaneListener> listener;
  {
    const std::lock_guard lock(mutex_);
    listener = listener_;
  }
  if (!listener) throw Error(Fault::usage, "accept before listen");
  return adopt(listener->accept(deadline), false, deadline);
}

std::shared_ptr<Peer> LaneContext::connect(const std::string& endpoint, Deadline deadline) {
  require_open();
  if (is_local(endpoint) != (wire_ == Wire::local))
    throw Error(Fault::usage, "'" + endpoint + "' is not an endpoint of this backend: does the peer run another one?");
  return adopt(connect_lanes(endpoint, token_, lane_count_, deadline, closing_.fd()), true, deadline);
}

std::shared_ptr<Peer> LaneContext::adopt(std::vector<Socket> lanes, bool first, Deadline deadline) {
  std::shared_ptr<LanePeer> peer;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw closed_error();
    peer = make_peer(events_, static_cast<std::uint32_t>(peers_.size()), std::move(lanes));
    peers_.push_back(peer);  // close() ends its wire-up; one that fails stays, as one that is lost does
  }
  try {
    peer->wire_up(first, deadline);
    const std::lock_guard lock(mutex_);
    if (closed_) throw closed_error();
    peer->start();
  } catch (const std::exception& error) {
    peer->close();
    if (dynamic_cast<const std::system_error*>(&error) != nullptr)
      throw Error(Fault::unavailable, "no more threads to be had for the peer's connections");
    throw;
  }
  return peer;
}

std::string LaneContext::export_keys(std::span<const Region> regions) {
  std::vector<RegionKey> keys;
  for (const Region& region : regions) keys.push_back(key(region));
  return write_keys(keys);
}

LanePeer& LaneContext::own(const Peer& peer) const {
  const std::lock_guard lock(mutex_);
  for (const auto& mine : peers_)
    if (mine.get() == &peer) return *mine;
  throw Error(Fault::usage, "the peer belongs to another context");
}

LanePlan& LaneContext::own(Plan& plan) const {
  auto* mine = dynamic_cast<LanePlan*>(&plan);
  if (mine == nullptr) throw Error(Fault::usage, "the plan belongs to another context");
  own(mine->peer());
  return *mine;
}

std::shared_ptr<Plan> LaneContext::prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) {
  return own(peer).prepare(arrays, regions_, deadline);
}

// What is armed need not be said: the initiator's post names its segments itself.
void LaneContext::arm(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag) {
  LanePlan& mine = own(plan);
  mine.ranges(segments, armed_ranges_);
  mine.peer().arm(mine, op, tag);
}

void LaneContext::post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                       const ReadyFlag* ready) {
  if (op == Op::pull && ready != nullptr)
    throw Error(Fault::usage, "a pull takes no ready flag: the passive side arms it when the data is ready");
  LanePlan& mine = own(plan);
  mine.peer().post(mine, op, segments, tag, ready);
}

void LaneContext::release(Peer& peer, std::uint64_t tag) { own(peer).release(tag); }

bool LaneContext::cancel(Peer& peer, std::uint64_t tag) { return own(peer).cancel(tag); }

std::size_t LaneContext::poll(std::span<Event> events, Deadline deadline) { return events_.pop(events, deadline); }

std::vector<std::shared_ptr<LanePeer>> LaneContext::peers() const {
  const std::lock_guard lock(mutex_);
  return peers_;
}

std::uint64_t LaneContext::bytes_moved() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& peer : peers_) sum += peer->bytes_moved();
  return sum;
}

void LaneContext::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (listener_) listener_->interrupt();
    listener_.reset();  // an accept() under way holds on to it until it notices
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(closing_.fd(), &one, sizeof one);
  // peers_ grows no more; their threads need nothing of ours, and poll() goes on to tell how they end.
  for (const auto& peer : peers_) peer->close();
  events_.stop_waiting();
}

}  // namespace kvxfer
