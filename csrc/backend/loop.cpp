#include "backend/loop.h"

#include <algorithm>
#include <array>

namespace kvxfer {

namespace {

constexpr Nanoseconds poll_slice = 500'000'000;

class Loop {
 public:
  Loop(Context& context, Peer& peer, std::span<const LoopRequest> requests, const PoolView& pool,
       const LoopSettings& settings)
      : context_(context), peer_(peer), requests_(requests), pool_(pool), set_(settings) {
    const bool prefill = set_.side == Side::prefill;
    initiator_ = (set_.op == Op::push) == prefill;
    began_.resize(set_.count);
    busy_.resize(requests_.size());
    if (prefill) {
      result_.handover_ns.resize(set_.count);
      ready_.resize(set_.count);
    }
    if (initiator_) {
      result_.transfer_ns.resize(set_.count);
      result_.post_ns.resize(set_.count);
    }
  }

  LoopResult run() {
    arm_what_may_run();
    Nanoseconds quiet_since = now_ns();
    std::uint64_t moved = context_.bytes_moved();
    std::array<Event, 1> event;  // one at a time: what comes after the last belongs to the next loop
    while (finished_ < set_.count) {
      if (context_.poll(event, Deadline::after(std::min(poll_slice, set_.stall_ns))) > 0) {
        take(event[0]);
        quiet_since = now_ns();
        continue;
      }
      if (const std::string why = peer_.lost(); !why.empty())
        throw Error(Fault::peer_lost, "the peer was lost: " + why);
      const std::uint64_t moved_now = context_.bytes_moved();
      if (moved_now != moved) quiet_since = now_ns();
      moved = moved_now;
      if (now_ns() - quiet_since > set_.stall_ns)
        throw Error(Fault::peer_lost, "nothing moved for " + std::to_string(set_.stall_ns / 1'000'000) + " ms");
    }
    result_.wall_ns = last_done_ - first_begun_;
    return std::move(result_);
  }

 private:
  std::size_t slot(std::uint64_t epoch) const { return epoch % requests_.size(); }
  const LoopRequest& request(std::uint64_t epoch) const { return requests_[slot(epoch)]; }

  std::size_t index(std::uint64_t epoch) const {
    if (epoch < set_.first_epoch || epoch - set_.first_epoch >= set_.count)
      throw Error(Fault::peer_lost, "the peer speaks of request " + std::to_string(epoch) + ", which is not running");
    return epoch - set_.first_epoch;
  }

  void begin(std::size_t i) {
    began_[i] = now_ns();
    if (first_begun_ == 0) first_begun_ = began_[i];
  }

  // Prefill: the KV of this request is now in place.
  void make_ready(std::uint64_t epoch) {
    if (set_.check) stamp(pool_, request(epoch).prefill_table, set_.seed, epoch);
    ready_[index(epoch)] = now_ns();
  }

  // Passive side. Requests may end out of order: the next one waits until the blocks of its slot are free again.
  void arm_what_may_run() {
    while (!initiator_ && armed_ < set_.count && armed_ - finished_ < set_.inflight) {
      const std::uint64_t epoch = set_.first_epoch + armed_;
      if (busy_[slot(epoch)]) return;
      busy_[slot(epoch)] = true;
      ++armed_;
      if (set_.side == Side::prefill) make_ready(epoch);
      begin(index(epoch));
      context_.arm(*request(epoch).plan, set_.op, {}, epoch);
    }
  }

  // Initiator.
  void post(std::uint64_t epoch) {
    const std::size_t i = index(epoch);
    if (set_.side == Side::prefill) make_ready(epoch);
    begin(i);
    context_.post(*request(epoch).plan, set_.op, {}, epoch, nullptr);
    result_.post_ns[i] = now_ns() - began_[i];
  }

  // Every byte is in place, and both sides know or are being told.
  void usable(const Event& event) {
    const std::size_t i = index(event.tag);
    last_done_ = event.time_ns;
    if (initiator_) result_.transfer_ns[i] = event.time_ns - began_[i];
    if (set_.side == Side::prefill) {
      result_.handover_ns[i] = event.time_ns - ready_[i];
    } else {
      const LoopRequest& done = request(event.tag);
      if (set_.check)
        result_.wrong_epochs += wrong_epochs(pool_, done.decode_table, done.prefill_table, set_.seed, event.tag);
      context_.release(peer_, event.tag);
      finish(event.tag);
    }
  }

  void finish(std::uint64_t epoch) {
    index(epoch);  // throws when it is none of ours
    ++finished_;
    busy_[slot(epoch)] = false;
    arm_what_may_run();
  }

  void take(const Event& event) {
    if (event.peer != peer_.id()) return;
    switch (event.kind) {
      case EventKind::armed:
        if (initiator_) post(event.tag);
        return;
      case EventKind::confirmed:
        if (initiator_) usable(event);
        return;
      case EventKind::delivered:
        if (!initiator_) usable(event);
        return;
      case EventKind::released:
        if (set_.side == Side::prefill) finish(event.tag);
        return;
      case EventKind::local:
        return;
      case EventKind::cancelled:
      case EventKind::error:
      case EventKind::peer_lost:
        throw Error(Fault::peer_lost, "the peer was lost: " + peer_.lost());
    }
  }

  Context& context_;
  Peer& peer_;
  const std::span<const LoopRequest> requests_;
  const PoolView& pool_;
  const LoopSettings set_;
  bool initiator_ = false;
  std::vector<bool> busy_;  // slots of the rotation that the passive side has armed
  std::uint32_t armed_ = 0;
  std::uint32_t finished_ = 0;
  std::vector<Nanoseconds> began_;
  std::vector<Nanoseconds> ready_;
  Nanoseconds first_begun_ = 0;
  Nanoseconds last_done_ = 0;
  LoopResult result_;
};

}  // namespace

LoopResult run_loop(Context& context, Peer& peer, std::span<const LoopRequest> requests, const PoolView& pool,
                    const LoopSettings& settings) {
  if (requests.empty() || settings.count == 0 || settings.inflight == 0 || settings.stall_ns <= 0)
    throw Error(Fault::usage, "a loop needs requests, a count, room in flight and a stall time");
  if (std::min(settings.inflight, settings.count) > requests.size())
    throw Error(Fault::usage, std::to_string(settings.inflight) + " requests in flight over " +
                                  std::to_string(requests.size()) + " block tables would overwrite each other");
  return Loop(context, peer, requests, pool, settings).run();
}

}  // namespace kvxfer
