// What contexts have in common whose backend moves memory between peers that are wired up over lanes.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/event_queue.h"
#include "backend/lane.h"
#include "backend/lane_peer.h"
#include "memory/mapping.h"

namespace kvxfer {

// What lanes go over; `local` ones join processes of one host.
enum class Wire : std::uint8_t { tcp, local };

class LaneContext : public Context {
 public:
  // `lanes`: connections that connect() opens per peer.
  LaneContext(Capabilities capabilities, std::string token, std::uint16_t lanes, Wire wire = Wire::tcp);
  ~LaneContext() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  Region allocate(std::uint64_t bytes, MemoryKind kind, int numa) override;
  Region register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) override;
  // Over local lanes the address and port mean nothing: the kernel finds a free name.
  std::string listen(const std::string& address, std::uint16_t port) override;
  std::shared_ptr<Peer> accept(Deadline deadline) override;
  std::shared_ptr<Peer> connect(const std::string& endpoint, Deadline deadline) override;
  std::string export_keys(std::span<const Region> regions) override;
  std::shared_ptr<Plan> prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) override;
  void arm(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag) override;
  void post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override;
  void release(Peer& peer, std::uint64_t tag) override;
  bool cancel(Peer& peer, std::uint64_t tag) override;
  std::size_t poll(std::span<Event> events, Deadline deadline) override;
  void put_back(std::span<const Event> events) override { events_.put_back(events); }
  void progress(Deadline) override {}  // the lanes have threads of their own
  int event_fd() override { return events_.descriptor(); }
  std::uint64_t bytes_moved() const override;
  void close() noexcept override;

 protected:
  void require_open() const;  // throws Error(usage)
  // Throws Error(unavailable) on memory that this backend does not move.
  virtual void require_kind(MemoryKind kind) const;
  // Throws, changing nothing, what register_memory() would.
  void require_region(const std::byte* address, std::uint64_t bytes, MemoryKind kind) const;
  virtual std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) = 0;
  std::vector<std::shared_ptr<LanePeer>> peers() const;
  // What the peer is told of a region.
  virtual RegionKey key(const Region& region) const { return {region.id, 0, region.bytes, 0}; }

  // The memory from allocate(), numbered from 0; nullptr when there is none of that number. From any thread.
  const Mapping* pool(std::uint32_t number) const;
  // The number of the one that holds all of these bytes.
  std::optional<std::uint32_t> pool_of(const std::byte* address, std::uint64_t bytes) const;

 private:
  std::shared_ptr<Peer> adopt(std::vector<Socket> lanes, bool first, Deadline deadline);
  LanePeer& own(const Peer& peer) const;
  LanePlan& own(Plan& plan) const;

  const Capabilities capabilities_;
  const std::string token_;
  const std::uint16_t lane_count_;
  const Wire wire_;
  EventQueue events_;
  const Socket closing_;             // an eventfd, readable from close() on: ends connect()
  std::vector<Range> armed_ranges_;  // what arm() looks at; a member so that it does not allocate
  std::vector<Region> regions_;
  mutable std::mutex mutex_;      // of what follows: close() comes from any thread
  std::deque<Mapping> mappings_;  // stay where they are
  std::shared_ptr<LaneListener> listener_;
  std::vector<std::shared_ptr<LanePeer>> peers_;
  bool closed_ = false;
};

}  // namespace kvxfer
