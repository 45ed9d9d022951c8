// What peers have in common whose initiator does all the copying: it reaches the other side's memory itself, and the
// other side only hears of it (lane 0).
//
//   push: chunks are copied there;  local;  written →            ← confirm;  delivered there, confirmed here
//   pull: chunks are copied here;           delivered →                      delivered there, confirmed here
//
// Copy threads take the next chunk of whichever transfer was posted first. A small request is one chunk, so one thread
// copies it; larger ones are shared. Every chunk is at most a mebibyte: between two of them a transfer can be
// cancelled, its peer given up, and its progress told.
#pragma once

#include <atomic>
#include <condition_variable>
#include <optional>
#include <vector>

#include "backend/lane_peer.h"

namespace kvxfer {

class CopyPeer : public LanePeer {
 public:
  struct Effort {
    std::size_t threads;
    std::size_t pieces_per_call;  // that copy() gets at once
  };

  // `lanes`: one.
  CopyPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort);

  void start() override;
  void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override;
  bool cancel(std::uint64_t tag) override;
  std::uint64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 protected:
  // Copies pieces of pairwise equal length, from local to remote in a push and back in a pull; may alter both arrays.
  // Returns 0, or the error code that loses the peer. On several threads at once.
  virtual int copy(Op op, std::span<iovec> local, std::span<iovec> remote, bool past_caches) = 0;
  virtual std::string why_not_copied(int code) const = 0;

  std::string handle(const Notice& notice, std::span<const std::uint32_t> segments) override;
  void end_open_transfers() override;
  // The peer may free its memory, or use it for something else, as soon as it has closed: no copy of this side's is
  // under way there then.
  void let_go(Parting) noexcept override;
  void await_peer() noexcept override;

 private:
  // One that was posted here.
  struct Transfer {
    bool open = false;
    bool cancelling = false;
    bool copied = false;  // every byte; the other side is being told
    bool lost = false;    // with its peer: it ends once no thread copies any of it
    Op op = Op::push;
    std::uint64_t tag = 0;
    LanePlan* plan = nullptr;
    const ReadyFlag* ready = nullptr;
    std::vector<Range> left;  // to hand to threads
    std::size_t next_left = 0;
    std::uint64_t chunk_bytes = 0;
    std::uint64_t total = 0;
    std::uint64_t done = 0;
    std::uint64_t told = 0;  // of done, to the other side
    Nanoseconds told_at = 0;
    std::uint32_t chunks_out = 0;  // in the hands of threads right now

    bool handed_out() const { return next_left == left.size(); }
  };

  struct Chunk {
    Transfer* transfer = nullptr;
    Range range;
  };

  // What to tell once the lock is released, in this order.
  struct Outcome {
    bool local = false;
    std::optional<Notice> notice;
    std::optional<EventKind> event;
    std::uint64_t tag = 0;
  };

  void copy_chunks();
  void give_up(const Chunk& chunk, int code);
  void end_in_error(Transfer& transfer);  // with mutex_ held
  int copy_chunk(const Chunk& chunk, std::span<iovec> local, std::span<iovec> remote);
  void perform(const Outcome& outcome);
  std::string was_written(const Notice& notice);
  std::string was_confirmed(const Notice& notice);

  // With mutex_ held:
  Transfer* find(std::uint64_t tag);
  Transfer& open_transfer(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag);
  bool take_chunk(Chunk& chunk, bool& waits_for_ready);
  Outcome chunk_done(const Chunk& chunk);
  Outcome stop(Transfer& transfer);
  static Notice about(Transfer& transfer, NoticeKind kind);

  const Effort effort_;
  const std::uint64_t cache_bytes_;
  std::vector<Transfer> transfers_;  // max_inflight; under mutex_, as what follows
  std::vector<Transfer*> queue_;     // with chunks left to hand out, in order of posting
  std::condition_variable work_;
  std::condition_variable idle_;
  std::size_t copying_ = 0;  // threads that hold a chunk
  bool no_more_ = false;
  std::atomic<std::uint64_t> bytes_moved_{0};
};

}  // namespace kvxfer
