// What peers have in common whose backend wires up over lanes: keys, collective prepare, and small notices on lane 0.
#pragma once

#include <sys/uio.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/event_queue.h"
#include "backend/lane.h"

namespace kvxfer {

enum class NoticeKind : std::uint32_t {
  prepare = 1,     // plan, count = descriptors; payload: WireDescriptor[]
  arm,             // plan, op, tag
  release,         // tag
  bye,             // the sender closes in order
  request,         // plan, op, tag; payload: segment numbers (none: all). A pull (tcp), or any post (null)
  confirm,         // tag: the target has every byte of a push
  delivered,       // tag: the initiator has every byte of a pull
  cancel_request,  // tag: the initiator of a pull wants no more
  cancelled,       // plan, op, tag, count = bytes sent, total: no more will come
  cancel_seen,     // tag: the target of a push will write no more
  // Of backends whose initiator does all the copying:
  progress,     // plan, op, tag, count = bytes copied since the last such notice
  written,      // plan, op, tag, count as above: the initiator of a push has written every byte
  pool_wanted,  // count = number of a pool
  pool,         // count = number, total = bytes; with its descriptor
};

// Everything on lane 0 is one of these, then payload_bytes of payload.
struct Notice {
  std::uint32_t magic = 0x4e58564b;  // "KVXN"
  NoticeKind kind = NoticeKind::bye;
  std::uint32_t plan = 0;
  Op op = Op::push;
  std::uint8_t reserved[3] = {};
  std::uint64_t tag = 0;
  std::uint64_t count = 0;
  std::uint64_t total = 0;
  std::uint64_t payload_bytes = 0;
};
static_assert(sizeof(Notice) == 48);

struct WireDescriptor {
  std::uint32_t region = 0;
  std::uint32_t reserved = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};
static_assert(sizeof(WireDescriptor) == 24);

// What a context tells its peers about a region; the control channel carries it.
struct RegionKey {
  std::uint32_t id = 0;
  std::uint32_t pool = 0;  // shm: the number of the memory that holds it
  std::uint64_t bytes = 0;
  std::uint64_t place = 0;  // shm: where in that memory; cma: its address in the owner's process
};
static_assert(sizeof(RegionKey) == 24);

std::string write_keys(std::span<const RegionKey> keys);
// Throws Error(usage) on what write_keys() did not write.
std::vector<RegionKey> read_keys(const std::string& keys);

inline constexpr std::uint64_t max_descriptors = std::uint64_t{1} << 24;
inline constexpr std::size_t max_segments = std::size_t{1} << 20;
inline constexpr std::uint32_t max_inflight = 256;
inline constexpr std::size_t max_last_events = 2 * max_inflight + 1;  // errors of all open transfers, and peer_lost

// A ready flag may be set by a device that can wake nobody: it is looked at this often.
inline constexpr std::chrono::microseconds ready_interval{20};

// What a failed system call on a lane means to the user.
std::string closed_or(int code);

// The bytes [from, to) of a plan, counted through its descriptors in order.
struct Range {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
};

// How a peer ends: by close(), or because it cannot be used any more.
enum class Parting : std::uint8_t { in_order, lost };

class LanePeer;

class LanePlan final : public Plan {
 public:
  // `remote`: where the pieces lie on the other side, for backends that reach there; else empty.
  LanePlan(LanePeer& peer, std::uint32_t id, std::vector<iovec> pieces, std::vector<std::byte*> remote,
           std::span<const std::uint32_t> segment_starts);

  std::uint64_t bytes() const override { return starts_.back(); }
  std::uint32_t descriptors() const override { return static_cast<std::uint32_t>(pieces_.size()); }
  std::uint32_t segments() const override { return static_cast<std::uint32_t>(segment_starts_.size()); }

  std::uint32_t peer_id() const override;
  LanePeer& peer() const { return peer_; }
  std::uint32_t id() const { return id_; }
  // Byte ranges of the segments, neighbours joined; all of the plan when none is named. No range is empty, unless it is
  // the only one. Throws Error(usage) on an unknown segment and on more bytes than the plan has.
  void ranges(std::span<const std::uint32_t> segments, std::vector<Range>& into) const;
  // Fills `into` with the memory behind the plan's bytes from `at` on, at most `limit` bytes; returns the number of
  // entries and advances `at`. `remote`, if it has room for as many: the same on the other side.
  std::size_t pieces(std::uint64_t& at, std::uint64_t limit, std::span<iovec> into, std::span<iovec> remote = {}) const;

 private:
  LanePeer& peer_;
  std::uint32_t id_;
  std::vector<iovec> pieces_;
  std::vector<std::byte*> remote_;     // as many, or none
  std::vector<std::uint64_t> starts_;  // byte position of each piece, and of the end
  std::vector<std::uint32_t> segment_starts_;
};

class LanePeer : public Peer {
 public:
  LanePeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes);
  ~LanePeer() override;

  std::uint32_t id() const override { return id_; }
  void import_keys(const std::string& keys) override;
  std::string lost() const override;

  virtual std::shared_ptr<LanePlan> prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                            Deadline deadline);
  void arm(const LanePlan& plan, Op op, std::uint64_t tag);
  void release(std::uint64_t tag);
  virtual void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                    const ReadyFlag* ready) = 0;
  virtual bool cancel(std::uint64_t tag) = 0;
  virtual std::uint64_t bytes_moved() const { return 0; }

  // What an engine has to do to reach the peer, with lanes that are open already; before start(). `first`: of this
  // side, which connected. Throws Error(peer_lost) at the deadline, or once close() is called.
  virtual void wire_up(bool /*first*/, Deadline) {}
  // Begins to read notices; called once the object is complete.
  virtual void start();
  // Idempotent, from any thread; joins every thread. Destructors of derived classes call it: the threads use their
  // members.
  void close() noexcept;

 protected:
  // The notices that only some backends use. Runs on the notice thread; must not wait for the application. Returns an
  // explanation when the notice makes no sense.
  virtual std::string handle(const Notice& notice, std::span<const std::uint32_t> segments) = 0;
  // Ends every open transfer with an error event; called with mutex_ held.
  virtual void end_open_transfers() = 0;
  // Where this side's copies find a region of the peer: in this address space, or in the peer's. nullptr for backends
  // whose initiator does not reach there. Called by prepare(), once for each region; may wait.
  virtual std::byte* locate(const RegionKey&, Deadline) { return nullptr; }
  // This side closes, or gives the peer up, which may be about to close: before the peer is told or lanes are shut,
  // which it may wait for. On any thread that fail() is called on.
  virtual void let_go(Parting) noexcept {}
  // Tells the peer that this side closes in order.
  virtual void say_bye() noexcept;
  // This side is about to close: the peer has been told; after this its lanes are shut. May wait, but not for long.
  virtual void await_peer() noexcept {}

  // Runs `body` on a thread that close() joins. Signals are for the application's threads; an exception loses the peer.
  void run(std::function<void()> body);
  // Over lane 0, or whatever the engine has for it. `descriptor`: goes along, over local lanes.
  virtual void send(const Notice& notice, const void* payload = nullptr, int descriptor = -1);
  // Of a notice that has come whole: why the peer must be given up, or nothing.
  std::string take(const Notice& notice, std::span<const std::uint32_t> segments);
  // The peer's regions from here on.
  void learn(std::span<const RegionKey> keys);
  void emit(EventKind kind, std::uint64_t tag, Nanoseconds at = now_ns());
  // With mutex_ held, so that the transfer's end comes after it. Left out when there is no room.
  void emit_local(std::uint64_t tag);
  void emit_error(std::uint64_t tag);  // the end of a transfer when the peer is lost; safe with mutex_ held
  // Why it is about to fail(): what comes of that, such as that the peer hangs up, is no reason any more.
  void set_cause(std::string_view why) noexcept;
  // The peer is gone (or breaks the protocol): tells the application, wakes and ends every thread. Safe from any
  // thread.
  void fail(std::string_view why);
  void require_alive() const;
  LanePlan* plan(std::uint32_t id);  // nullptr when there is none; with mutex_ held

  const std::vector<Socket> lanes_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;      // under mutex_
  bool notices_over_ = false;  // under mutex_: the notice thread has ended
  Socket attached_;            // the descriptor that came with the notice being read, if any; notice thread only

 private:
  struct RemoteRegion {
    RegionKey key;
    bool located = false;
    std::byte* address = nullptr;
  };

  std::byte* locate_once(RemoteRegion& region, Deadline deadline);
  void set_lost(std::string_view why) noexcept;  // with mutex_ held
  void read_notices();
  std::string receive_notice(const Notice& notice);
  std::string receive_prepare(const Notice& notice);
  void compare_prepared(std::uint32_t id, const PlanArrays& arrays, const std::vector<WireDescriptor>& theirs) const;

  EventQueue& events_;
  const std::uint32_t id_;
  std::mutex send_mutex_;
  std::string lost_;                                                       // under mutex_
  std::map<std::uint32_t, RemoteRegion> remote_regions_;                   // by id; application thread only
  std::vector<std::shared_ptr<LanePlan>> plans_;                           // under mutex_
  std::map<std::uint32_t, std::vector<WireDescriptor>> prepared_by_peer_;  // under mutex_
  std::uint64_t prepared_early_ = 0;                                       // descriptors in there
  std::uint32_t next_of_peer_ = 0;       // the number of the plan that it prepares next; notice thread only
  std::vector<std::uint32_t> segments_;  // of the notice being read; notice thread only
  std::atomic<bool> flooded_ = false;    // there was no room for an event
  std::mutex close_mutex_;               // of threads_, which grow only in start()
  std::vector<std::thread> threads_;
};

}  // namespace kvxfer
