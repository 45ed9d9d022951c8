// The interface that every backend implements, and the words it is spoken in.
//
// A transfer moves the descriptors of a plan between two contexts. The initiator posts it; the other side is passive.
// In a push the bytes go from the initiator's local side to the passive side, in a pull the other way. What happens is
// told by events, by tag; a tag names one open transfer of a peer and may be used again once that transfer has ended.
//
//   initiator                          passive side
//   ---------                          ------------
//                     <-  arm(tag)     the data (pull) or the room (push) is ready
//   armed
//   post(tag)          ... bytes ...
//   local              (push only: the source has been read; says nothing about delivery, and may be left out)
//   confirmed                          delivered        every byte is in place, and the other side has been told
//                     <-  release(tag) or ->            whoever consumed the bytes is done with both sides' blocks
//   released                           released         (at the side that did not call it)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/clock.h"
#include "backend/error.h"
#include "memory/mapping.h"

namespace kvxfer {

enum class Op : std::uint8_t { push = 0, pull = 1 };
enum class MemoryKind : std::uint8_t { host = 0, cuda = 1 };  // cuda: a GPU's, which no CPU reads or writes

inline const char* name_of(MemoryKind kind) { return kind == MemoryKind::cuda ? "cuda" : "host"; }

// One contiguous registered piece of memory. `id` counts the regions of a context from 0 and is what the peer calls it.
struct Region {
  std::uint32_t id = 0;
  MemoryKind kind = MemoryKind::host;
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
};

// Descriptors as arrays of equal length, of which a length may be 0; `segment_starts` holds the first descriptor of
// each segment, ascending from 0.
struct PlanArrays {
  std::span<const std::uint32_t> local_regions;
  std::span<const std::uint64_t> local_offsets;
  std::span<const std::uint32_t> remote_regions;
  std::span<const std::uint64_t> remote_offsets;
  std::span<const std::uint64_t> lengths;
  std::span<const std::uint32_t> segment_starts;
};

enum class Confirms : std::uint8_t { target, initiator };

struct Capabilities {
  bool one_sided = false;   // the passive side's application need not take part in a transfer
  bool needs_arm = false;   // post() throws Error(usage) before poll() has given `armed` for its tag
  bool own_memory = false;  // only parts of what allocate() gave can be registered: others are Error(usage)
  bool moves_data = true;   // false: the null backend
  bool push = true;
  bool pull = true;
  std::uint32_t max_inflight = 1;  // open transfers per peer; one more throws Error(unavailable)
  Confirms push_confirmed_by = Confirms::target;
  std::vector<MemoryKind> memory{MemoryKind::host};
  Backing backing = Backing::anonymous;  // what allocate() makes host memory of
};

enum class EventKind : std::uint8_t { armed, local, confirmed, delivered, released, cancelled, error, peer_lost };

struct Event {
  std::uint64_t tag = 0;  // 0 for peer_lost
  EventKind kind = EventKind::error;
  std::uint32_t peer = 0;  // Peer::id()
  Nanoseconds time_ns = 0;
};

class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::uint32_t id() const = 0;
  // The other side's exported keys. Throws Error(usage) on keys that no context exported.
  virtual void import_keys(const std::string& keys) = 0;
  // The transport really used, one entry per lane.
  virtual std::vector<std::string> describe() const = 0;
  // Why the peer was lost; empty while it is not.
  virtual std::string lost() const = 0;
};

class Plan {
 public:
  virtual ~Plan() = default;
  virtual std::uint32_t peer_id() const = 0;  // Peer::id() of the one that it was prepared with
  virtual std::uint64_t bytes() const = 0;
  virtual std::uint32_t descriptors() const = 0;
  virtual std::uint32_t segments() const = 0;
};

// Set by whoever produces the bytes (from another thread, or by a device writing host memory); not zero: ready.
using ReadyFlag = std::atomic<std::uint32_t>;

// Everything of one side of a run. All functions may be called from one application thread; close() from any. What is
// called with mistakes throws Error(usage) and changes nothing.
class Context {
 public:
  virtual ~Context() = default;
  virtual const Capabilities& capabilities() const = 0;

  // Memory that this engine likes best (on a NUMA node, or with -1 wherever the kernel puts it), and memory of others.
  // Throws Error(unavailable) when there is not enough, no such node, or none of that kind to be had; the other when it
  // does not move that kind.
  virtual Region allocate(std::uint64_t bytes, MemoryKind kind, int numa) = 0;
  virtual Region register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) = 0;

  // Returns the endpoint that connect() takes on the other side. Throws Error(unavailable) when the port is in use.
  virtual std::string listen(const std::string& address, std::uint16_t port) = 0;
  virtual std::shared_ptr<Peer> accept(Deadline deadline) = 0;
  virtual std::shared_ptr<Peer> connect(const std::string& endpoint, Deadline deadline) = 0;
  virtual std::string export_keys(std::span<const Region> regions) = 0;

  // Collective: both sides prepare the same plans of a peer in the same order, each with its own view of local and
  // remote. Throws Error(usage) at the side that finds the other's to differ.
  virtual std::shared_ptr<Plan> prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) = 0;

  // None of these waits. `segments` empty: all of them; one that the plan has not is refused. arm() names those that
  // the post will. `ready` is for pushes: the bytes of a pull are ready when it is armed.
  virtual void arm(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag) = 0;
  virtual void post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                    const ReadyFlag* ready) = 0;
  virtual void release(Peer& peer, std::uint64_t tag) = 0;
  // By the initiator. Ends in cancelled on both sides, or in confirmed when it came too late. False: no such transfer.
  virtual bool cancel(Peer& peer, std::uint64_t tag) = 0;

  // Takes at most events.size() events; waits for the first until the deadline. 0: none came. An engine without threads
  // of its own moves its bytes in here, on both sides of a transfer: applications poll as long as one is open.
  virtual std::size_t poll(std::span<Event> events, Deadline deadline) = 0;
  // Events that poll() gave, and that are for whoever polls next: it gives them again, first.
  virtual void put_back(std::span<const Event> events) = 0;
  // Returns when all that arm(), post() and release() handed over has been taken from this side, or at the deadline:
  // whoever will not poll for a while calls it. Engines with threads of their own return at once.
  virtual void progress(Deadline deadline) = 0;
  // Readable while events wait; for event loops of others. -1: the engine has none.
  virtual int event_fd() = 0;
  // Payload bytes moved so far in either direction: a transfer that stands still can be told from a slow one.
  virtual std::uint64_t bytes_moved() const = 0;

  // How it moves bytes, beyond what it was asked: settings that it found, choices that it made. By name; for results.
  virtual std::map<std::string, std::string> details() const { return {}; }

  // Idempotent. Ends every open transfer with an error, on the other side too, and every wait of another thread. What
  // was to be polled still can be; whatever else needs an open context throws Error(usage), and what needs its peer
  // Error(peer_lost).
  virtual void close() noexcept = 0;
};

}  // namespace kvxfer
