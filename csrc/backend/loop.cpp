#include "backend/loop.h"

#include <algorithm>
#include <array>

namespace kvxfer {

namespace {

constexpr Nanoseconds poll_slice = 500'000'000;

class Loop {
 public:
  Loop(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
       const LoopSettings& settings)
      : context_(context),
        requests_(requests),
        set_(settings),
        legs_(requests[0].legs.size()),
        epochs_(regions, settings.seed, settings.check) {
    const bool prefill = set_.side == Side::prefill;
    initiator_ = (set_.op == Op::push) == prefill;
    progress_.resize(set_.count);
    leg_states_.resize(set_.count * legs_, LegState::idle);
    busy_.resize(requests_.size());
    if (prefill) result_.handover_ns.resize(set_.count);
    if (initiator_) {
      result_.transfer_ns.resize(set_.count);
      result_.post_ns.resize(set_.count);
    }
  }

  LoopResult run() {
    arm_what_may_run();
    Nanoseconds quiet_since = now_ns();
    std::uint64_t moved = context_.bytes_moved();
    std::array<Event, 1> event;  // one at a time: what comes after the last is for the next loop
    while (finished_ < set_.count) {
      if (context_.poll(event, Deadline::after(std::min(poll_slice, set_.stall_ns))) > 0) {
        if (take(event[0])) {
          quiet_since = now_ns();
          continue;
        }
      } else {
        require_peers(requests_[0]);
      }
      const std::uint64_t moved_now = context_.bytes_moved();
      if (moved_now != moved) quiet_since = now_ns();
      moved = moved_now;
      if (now_ns() - quiet_since > set_.stall_ns)
        throw Error(Fault::peer_lost, "nothing moved for " + std::to_string(set_.stall_ns / 1'000'000) + " ms");
    }
    context_.progress(Deadline::after(set_.stall_ns));  // nobody may poll before the next loop
    early_.put_back(context_);
    result_.checking_cpu_ns = epochs_.cpu_ns();
    result_.wall_ns = last_done_ - first_begun_;
    return std::move(result_);
  }

 private:
  // Of one leg of a request. `moving`: posted, or armed at the passive side.
  enum class LegState : std::uint8_t { idle, armed, moving, usable, released };

  // How far a request has come: legs that have reached each state, and when the request did.
  struct Progress {
    std::size_t armed = 0;
    std::size_t usable = 0;
    std::size_t released = 0;
    Nanoseconds ready_at = 0;
    Nanoseconds begun_at = 0;
    Nanoseconds usable_at = 0;
  };

  std::size_t slot(std::uint64_t epoch) const { return epoch % requests_.size(); }
  const LoopRequest& request(std::uint64_t epoch) const { return requests_[slot(epoch)]; }

  std::size_t index(std::uint64_t epoch) const {
    if (epoch < set_.first_epoch || epoch - set_.first_epoch >= set_.count)
      throw Error(Fault::peer_lost, "the peer speaks of request " + std::to_string(epoch) + ", which is not running");
    return epoch - set_.first_epoch;
  }

  LegState& leg_state(std::uint64_t epoch, std::uint32_t peer) {
    return leg_states_[index(epoch) * legs_ + leg_of(requests_[0], peer)];
  }

  // What is said twice or too early must not count for another leg, or for another request.
  void advance(const Event& event, LegState from, LegState to) {
    LegState& state = leg_state(event.tag, event.peer);
    if (state != from)
      throw Error(Fault::peer_lost, "the peer speaks of request " + std::to_string(event.tag) + " out of turn");
    state = to;
  }

  // A peer that is ready for a request of the next loop, while this one still waits for another peer.
  bool is_early(const Event& event) const {
    const bool beyond = event.tag >= set_.first_epoch && event.tag - set_.first_epoch >= set_.count;
    return event.kind == EventKind::armed && (beyond || leg_of(requests_[0], event.peer) == legs_);
  }

  void begin(Progress& progress) {
    progress.begun_at = now_ns();
    if (first_begun_ == 0) first_begun_ = progress.begun_at;
  }

  // Prefill: the KV of this request is now in place.
  void make_ready(std::uint64_t epoch) {
    epochs_.stamp_all(request(epoch), epoch);
    progress_[index(epoch)].ready_at = now_ns();
  }

  // Passive side. Requests may end out of order: the next one waits until the blocks of its slot are free again.
  void arm_what_may_run() {
    while (!initiator_ && armed_ < set_.count && armed_ - finished_ < set_.inflight) {
      const std::uint64_t epoch = set_.first_epoch + armed_;
      if (busy_[slot(epoch)]) return;
      busy_[slot(epoch)] = true;
      ++armed_;
      if (set_.side == Side::prefill) make_ready(epoch);
      begin(progress_[index(epoch)]);
      for (const Leg& leg : request(epoch).legs) {
        leg_state(epoch, leg.peer->id()) = LegState::moving;
        context_.arm(*leg.plan, set_.op, {}, epoch);
      }
    }
  }

  // Initiator; once every leg's other side is ready.
  void armed(const Event& event) {
    const std::uint64_t epoch = event.tag;
    const std::size_t i = index(epoch);
    advance(event, LegState::idle, LegState::armed);
    if (++progress_[i].armed != legs_) return;
    if (set_.side == Side::prefill) make_ready(epoch);
    begin(progress_[i]);
    for (const Leg& leg : request(epoch).legs) {
      leg_state(epoch, leg.peer->id()) = LegState::moving;
      context_.post(*leg.plan, set_.op, {}, epoch, nullptr);
    }
    result_.post_ns[i] = now_ns() - progress_[i].begun_at;
  }

  // Every byte of a leg is in place, and both sides know or are being told. The last leg counts.
  void usable(const Event& event) {
    const std::size_t i = index(event.tag);
    Progress& progress = progress_[i];
    advance(event, LegState::moving, LegState::usable);
    // Not the event that comes last: events of two peers may be queued in another order than they happened.
    progress.usable_at = std::max(progress.usable_at, event.time_ns);
    if (++progress.usable != legs_) return;
    last_done_ = std::max(last_done_, progress.usable_at);
    if (initiator_ && progress.usable_at < progress.begun_at)
      throw Error(Fault::peer_lost, "request " + std::to_string(event.tag) + " ended before it began: a wrong clock");
    if (initiator_) result_.transfer_ns[i] = progress.usable_at - progress.begun_at;
    if (set_.side == Side::prefill) {
      result_.handover_ns[i] = progress.usable_at - progress.ready_at;
      return;
    }
    result_.wrong_epochs += epochs_.wrong(request(event.tag), event.tag);
    for (const Leg& leg : request(event.tag).legs) context_.release(*leg.peer, event.tag);
    finish(event.tag);
  }

  // Prefill: decode is done with a leg.
  void released(const Event& event) {
    const std::uint64_t epoch = event.tag;
    advance(event, LegState::usable, LegState::released);
    if (++progress_[index(epoch)].released != legs_) return;
    epochs_.stamp_all(request(epoch), 0);  // other requests may cut the same memory into other pieces
    finish(epoch);
  }

  void finish(std::uint64_t epoch) {
    ++finished_;
    busy_[slot(epoch)] = false;
    arm_what_may_run();
  }

  // Whether a request has come further by it.
  bool take(const Event& event) {
    if (is_early(event)) {
      early_.keep(event);
      return false;
    }
    if (leg_of(requests_[0], event.peer) == legs_) return false;
    switch (event.kind) {
      case EventKind::armed:
        if (initiator_) armed(event);
        return initiator_;
      case EventKind::confirmed:
        if (initiator_) usable(event);
        return initiator_;
      case EventKind::delivered:
        if (!initiator_) usable(event);
        return !initiator_;
      case EventKind::released:
        if (set_.side == Side::prefill) released(event);
        return set_.side == Side::prefill;
      case EventKind::local:
        return false;
      case EventKind::cancelled:
      case EventKind::error:
      case EventKind::peer_lost:
        give_up(requests_[0]);
    }
    throw Error(Fault::peer_lost, "the backend tells an event of no known kind");
  }

  Context& context_;
  const std::span<const LoopRequest> requests_;
  const LoopSettings set_;
  const std::size_t legs_;
  Epochs epochs_;
  bool initiator_ = false;
  std::vector<bool> busy_;  // slots of the rotation that the passive side has armed
  std::uint32_t armed_ = 0;
  std::uint32_t finished_ = 0;
  std::vector<Progress> progress_;
  std::vector<LegState> leg_states_;  // of request i from i * legs_ on, as requests_[0] has the legs
  EarlyEvents early_;
  Nanoseconds first_begun_ = 0;
  Nanoseconds last_done_ = 0;
  LoopResult result_;
};

void require_sane(std::span<const LoopRequest> requests, const LoopSettings& settings) {
  if (requests.empty() || settings.count == 0 || settings.inflight == 0 || settings.stall_ns <= 0)
    throw Error(Fault::usage, "a loop needs requests, a count, room in flight and a stall time");
  if (std::min(settings.inflight, settings.count) > requests.size())
    throw Error(Fault::usage, std::to_string(settings.inflight) + " requests in flight over " +
                                  std::to_string(requests.size()) + " would overwrite each other");
  require_legs(requests);
}

}  // namespace

LoopResult run_loop(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
                    const LoopSettings& settings) {
  require_sane(requests, settings);
  return Loop(context, requests, regions, settings).run();
}

}  // namespace kvxfer
