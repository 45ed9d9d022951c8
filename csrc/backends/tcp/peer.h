// One peer of a tcp context: notices on lane 0, payload on the other lanes, a sending and a receiving thread for each
// of these, and with zero_copy one that hears from the kernel what it has sent.
//
// A transfer is a list of byte ranges of its plan. Whichever sending lane is free takes the next chunk of it, so the
// lanes stay equally busy; a chunk says which bytes of the plan it carries, and the receiving lane reads them straight
// into the blocks.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "backend/lane_peer.h"
#include "backends/tcp/zero_copy.h"

namespace kvxfer::tcp {

struct Tuning {
  std::uint64_t chunk_bytes;    // the most of a transfer that a lane takes at a time
  std::size_t pieces_per_call;  // descriptors per system call
  bool pin;                     // each lane's threads keep to one CPU, another one for every lane
  bool reno_on_lo;              // in place of the system's congestion control where both sides are on this host
  int busy_poll_us;             // how long a receiving call polls the network card before it sleeps
  bool zero_copy;               // the kernel sends from the blocks themselves
};

// What became of the sending calls of zero_copy.
struct ZeroCopyCount {
  std::uint64_t calls = 0;
  std::uint64_t copied = 0;   // of them, after all
  std::uint64_t refused = 0;  // beside them, and copied: no room
};

// Precedes every chunk on a data lane.
struct ChunkHeader {
  std::uint32_t magic = 0x4458564b;  // "KVXD"
  std::uint32_t plan = 0;
  std::uint64_t tag = 0;
  std::uint64_t from = 0;   // position in the plan's bytes
  std::uint64_t bytes = 0;  // that follow
  std::uint64_t total = 0;  // of the whole transfer
  Op op = Op::push;
  std::uint8_t reserved[7] = {};
};
static_assert(sizeof(ChunkHeader) == 48);

class TcpPeer final : public LanePeer {
 public:
  TcpPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, const Tuning& tuning);
  ~TcpPeer() override;

  void start() override;
  void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override;
  bool cancel(std::uint64_t tag) override;
  std::vector<std::string> describe() const override;
  std::uint64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }
  ZeroCopyCount zero_copy_count() const;

 protected:
  std::string handle(const Notice& notice, std::span<const std::uint32_t> segments) override;
  void end_open_transfers() override;

 private:
  enum class Role : std::uint8_t { send, receive };

  // An open transfer as this side sees it.
  struct Transfer {
    bool open = false;
    bool ended = false;  // told to the application; the slot is free once no lane writes from it
    bool cancelling = false;
    Role role = Role::send;
    Op op = Op::push;
    std::uint64_t tag = 0;
    LanePlan* plan = nullptr;
    std::uint64_t total = 0;
    std::uint64_t moved = 0;
    std::uint32_t chunks_out = 0;  // in the hands of lanes right now, or lent to the kernel
    // Sending: what is left to hand to lanes.
    const ReadyFlag* ready = nullptr;
    std::vector<Range> left;
    std::size_t next_left = 0;
    std::uint64_t chunk_bytes = 0;
    // Receiving: bytes that chunk headers have announced, and where a cancelled transfer stopped.
    std::uint64_t announced = 0;
    std::uint64_t stops_at = 0;

    bool handed_out() const { return next_left == left.size(); }
  };

  struct Chunk {
    Transfer* transfer = nullptr;
    ChunkHeader header;
  };

  // A chunk that the kernel has taken but may still read from the blocks, until the lane's calls below `end` are done.
  struct Lent {
    Chunk chunk;
    std::uint32_t end;
  };

  // The sending half of a data lane.
  struct Sender {
    std::size_t lane;
    Calls calls;              // its sending thread's own
    std::vector<iovec> room;  // likewise
    Progress progress;        // under mutex_
    std::vector<Lent> lent;   // under mutex_; in order, at most max_lent
  };

  // What to do once the lock is released.
  struct Outcome {
    std::optional<NoticeKind> notice;
    std::optional<EventKind> event;
    Notice content;
  };

  void keep_to_cpu(std::size_t lane) const;
  void send_chunks(Sender& sender);
  void receive_chunks(std::size_t lane);
  int send_chunk(Sender& sender, const Chunk& chunk);
  int send_pieces(Sender& sender, std::size_t used);
  void await_kernel(Sender& sender);
  void take_back(Sender& sender);
  int receive_chunk(int fd, const ChunkHeader& header, const LanePlan& plan, std::vector<iovec>& room);
  void perform(const Outcome& outcome);

  // With mutex_ held:
  Transfer* find(std::uint64_t tag, Role role, Op op);
  // nullptr when max_inflight transfers that the same side initiated are open.
  Transfer* open_transfer(std::uint64_t tag, Role role, Op op, LanePlan& plan);
  static bool posted_here(Role role, Op op) { return (role == Role::send) == (op == Op::push); }
  void queue(Transfer& transfer);
  static Outcome tell(const Transfer& transfer, std::optional<EventKind> event, std::optional<NoticeKind> notice);
  void free_if_idle(Transfer& transfer);
  Outcome end(Transfer& transfer, EventKind event, std::optional<NoticeKind> notice);
  bool take_chunk(Chunk& chunk, bool& waits_for_ready);
  void lend(Sender& sender, const Chunk& chunk, const Calls& before);
  Outcome chunk_sent(const Chunk& chunk);
  Outcome stop_sending(Transfer& transfer);
  Outcome settle_received(Transfer& transfer);
  std::string admit(const ChunkHeader& header, LanePlan*& plan, Transfer*& transfer);
  // Without it; each returns why the peer must be given up, or nothing.
  std::string start_sending(const Notice& notice, std::span<const std::uint32_t> segments);
  std::string sender_stopped(const Notice& notice);
  std::string answered(const Notice& notice);

  const Tuning tuning_;
  std::vector<Sender> senders_;  // of lane 1 and up
  // Fixed size, under mutex_: max_inflight of each side, and what has ended while a lane still held a chunk of it.
  std::vector<Transfer> transfers_;
  std::size_t used_ = 0;               // slots beyond were never open
  std::vector<Transfer*> send_queue_;  // in order of posting, under mutex_
  std::atomic<std::uint64_t> bytes_moved_{0};
  ZeroCopyCount zero_copy_count_;  // under mutex_
};

}  // namespace kvxfer::tcp
