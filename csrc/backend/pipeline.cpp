#include "backend/pipeline.h"

#include <algorithm>
#include <array>

#include "backend/prompt_timers.h"

namespace kvxfer {

namespace {

constexpr Nanoseconds poll_slice = 500'000'000;
// Tags of a request are its epoch and, below these bits, the number of a send.
constexpr std::uint32_t send_bits = 16;
constexpr std::uint64_t most_sends = std::uint64_t{1} << (send_bits - 1);
// The send that both sides meet with: its number is beyond those of all others.
constexpr std::uint64_t meeting = most_sends;
// Transfers of a leg that are open at once, or armed ahead: enough for a link never to wait for the next one.
constexpr std::uint32_t window = 64;
constexpr std::uint64_t most_samples = std::uint64_t{1} << 26;

class PipelineLoop {
 public:
  PipelineLoop(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
               std::span<const Send> sends, Compute* compute, const PipelineSettings& settings)
      : context_(context),
        requests_(requests),
        sends_(sends),
        compute_(compute),
        set_(settings),
        prefill_(settings.side == Side::prefill),
        initiator_((settings.op == Op::push) == prefill_),
        window_(std::min(window, context.capabilities().max_inflight)),
        epochs_(regions, settings.seed, settings.check),
        legs_(requests[0].legs.size()) {
    usable_at_.resize(std::max<std::size_t>(1, sends.size()));
    for (std::size_t l = 0; l < legs_.size(); ++l) {
      legs_[l].states.reserve(usable_at_.size());
      legs_[l].own.reserve(usable_at_.size());
    }
    first_segments_.segments.resize(legs_.size());
    for (std::size_t l = 0; l < legs_.size(); ++l)
      for (const Send& send : sends)
        if (first_segments_.segments[l].empty() && !send.segments[l].empty())
          first_segments_.segments[l] = {send.segments[l].front()};
    if (!prefill_) return;
    result_.total_ns.resize(set_.count);
    result_.compute_ns.resize(set_.count);
    result_.ready_ns.resize(set_.count * sends.size());
    result_.usable_ns.resize(set_.count * sends.size());
  }

  PipelineResult run() {
    if (set_.op == Op::pull && !sends_.empty()) meet();
    for (std::uint32_t i = 0; i < set_.count; ++i) {
      const std::uint64_t epoch = set_.first_epoch + i;
      begin(epoch, sends_, 0);
      if (prefill_)
        run_prefill(epoch, i);
      else
        run_decode(epoch);
    }
    context_.progress(Deadline::after(set_.stall_ns));  // nobody may poll before the next loop
    early_.put_back(context_);
    return std::move(result_);
  }

 private:
  // Of a leg's part of a send. `moving`: posted, or armed at the passive side.
  enum class State : std::uint8_t { idle, armed, moving, usable, released };

  struct LegProgress {
    std::vector<State> states;       // of every send
    std::vector<std::uint32_t> own;  // the sends that it has a part of, in order
    std::size_t next = 0;            // of own: not moving yet
    std::uint32_t open = 0;          // moving
  };

  const LoopRequest& request(std::uint64_t epoch) const { return requests_[epoch % requests_.size()]; }
  std::uint64_t tag(std::size_t send) const { return first_tag_ + send; }

  void begin(std::uint64_t epoch, std::span<const Send> sends, std::uint64_t first) {
    epoch_ = epoch;
    moving_ = sends;
    first_tag_ = (epoch << send_bits) + first;
    usable_ = released_ = parts_ = 0;
    computed_ = 0;
    going_ = true;
    std::ranges::fill(usable_at_, 0);
    for (std::size_t l = 0; l < legs_.size(); ++l) {
      LegProgress& leg = legs_[l];
      leg.states.assign(sends.size(), State::idle);
      leg.own.clear();
      leg.next = leg.open = 0;
      for (std::size_t s = 0; s < sends.size(); ++s)
        if (!sends[s].segments[l].empty()) leg.own.push_back(static_cast<std::uint32_t>(s));
      parts_ += leg.own.size();
    }
    early_.put_back(context_);
  }

  // The side that computes in a pull hears nothing of the other one before its clock runs. So one segment moves first.
  void meet() {
    begin(set_.first_epoch, {&first_segments_, 1}, meeting);
    until([this] { return usable_ == parts_; });
    if (prefill_)
      until([this] { return released_ == parts_; });
    else
      release_all();
  }

  void run_prefill(std::uint64_t epoch, std::size_t i) {
    going_ = false;
    if (set_.op == Op::push) until([this] { return first_ones_armed(); });
    epochs_.stamp_all(request(epoch), epoch);
    began_ = now_ns();
    compute_->start(began_);
    going_ = computing_ = true;
    until([this] { return usable_ == parts_ && computed_ == compute_->units(); });
    computing_ = false;
    record(i);
    until([this] { return released_ == parts_; });
    epochs_.stamp_all(request(epoch), 0);  // other requests may cut the same memory into other pieces
  }

  void run_decode(std::uint64_t epoch) {
    until([this] { return usable_ == parts_; });
    result_.wrong_epochs += epochs_.wrong(request(epoch), epoch);
    release_all();
  }

  void release_all() {
    for (std::size_t l = 0; l < legs_.size(); ++l)
      for (const std::uint32_t send : legs_[l].own) context_.release(*request(epoch_).legs[l].peer, tag(send));
  }

  void record(std::size_t i) {
    const Nanoseconds computed = compute_->units() == 0 ? began_ : compute_->ended(compute_->units() - 1);
    Nanoseconds last = computed;
    for (std::size_t s = 0; s < sends_.size(); ++s) {
      const std::uint32_t after = sends_[s].ready_after;
      const Nanoseconds ready = after == 0 ? began_ : compute_->ended(after - 1);
      result_.ready_ns[i * sends_.size() + s] = ready - began_;
      result_.usable_ns[i * sends_.size() + s] = std::max(ready, usable_at_[s]) - began_;
      last = std::max(last, usable_at_[s]);
    }
    result_.compute_ns[i] = computed - began_;
    result_.total_ns[i] = last - began_;
  }

  // Before the clock runs, as many as can be on their way at once.
  bool first_ones_armed() const {
    for (const LegProgress& leg : legs_)
      for (std::size_t i = 0; i < std::min<std::size_t>(window_, leg.own.size()); ++i)
        if (leg.states[leg.own[i]] == State::idle) return false;
    return true;
  }

  // Whether a send's bytes are there: at decode there is room for all of them.
  bool ready(std::uint32_t send) const { return !prefill_ || moving_[send].ready_after <= computed_; }

  // Posts or arms what may go, in the order of sends.
  void go_on() {
    if (computing_) computed_ = compute_->done();
    if (!going_) return;
    for (std::size_t l = 0; l < legs_.size(); ++l) {
      LegProgress& leg = legs_[l];
      Plan& plan = *request(epoch_).legs[l].plan;
      while (leg.next < leg.own.size() && leg.open < window_) {
        const std::uint32_t send = leg.own[leg.next];
        if (!ready(send) || (initiator_ && leg.states[send] != State::armed)) break;
        ++leg.next;
        ++leg.open;
        leg.states[send] = State::moving;
        if (initiator_)
          context_.post(plan, set_.op, moving_[send].segments[l], tag(send), nullptr);
        else
          context_.arm(plan, set_.op, moving_[send].segments[l], tag(send));
      }
    }
  }

  // Polls, and lets everything go as soon as it may, until `over`.
  template <typename Over>
  void until(const Over& over) {
    Nanoseconds quiet_since = now_ns();
    std::uint64_t moved = context_.bytes_moved();
    std::uint32_t computed = computed_;
    std::array<Event, 1> event;  // one at a time: what comes after the last is for the next loop
    for (;;) {
      go_on();
      if (over()) return;
      Nanoseconds wake = now_ns() + std::min(poll_slice, set_.stall_ns);
      if (computing_ && computed_ < compute_->units()) wake = std::min(wake, compute_->look_again());
      if (context_.poll(event, Deadline(wake)) > 0) {
        if (take(event[0])) quiet_since = now_ns();
        continue;
      }
      require_peers(requests_[0]);
      const std::uint64_t moved_now = context_.bytes_moved();
      if (moved_now != moved || computed_ != computed) quiet_since = now_ns();
      moved = moved_now;
      computed = computed_;
      if (now_ns() - quiet_since > set_.stall_ns)
        throw Error(Fault::peer_lost, "nothing moved for " + std::to_string(set_.stall_ns / 1'000'000) + " ms");
    }
  }

  // What is said twice or too early must not count for another send.
  std::size_t advance(const Event& event, std::size_t leg, State from, State to) {
    const std::uint64_t send = event.tag - first_tag_;
    if (event.tag < first_tag_ || send >= moving_.size() || legs_[leg].states[send] != from)
      throw Error(Fault::peer_lost, "the peer speaks of send " + std::to_string(event.tag) + " out of turn");
    legs_[leg].states[send] = to;
    return send;
  }

  // Of a request, or a loop, that this side has not come to.
  bool is_early(const Event& event) const {
    return event.kind == EventKind::armed && (event.tag < first_tag_ || event.tag - first_tag_ >= moving_.size() ||
                                              leg_of(request(epoch_), event.peer) == legs_.size());
  }

  void usable(const Event& event, std::size_t leg) {
    const std::size_t send = advance(event, leg, State::moving, State::usable);
    if (computing_ && event.time_ns < began_)
      throw Error(Fault::peer_lost, "send " + std::to_string(send) + " ended before its request began: a wrong clock");
    // Not the event that comes last: events of two peers may be queued in another order than they happened.
    usable_at_[send] = std::max(usable_at_[send], event.time_ns);
    ++usable_;
    --legs_[leg].open;
  }

  // Whether a send has come further by it.
  bool take(const Event& event) {
    if (is_early(event)) {
      early_.keep(event);
      return false;
    }
    const std::size_t leg = leg_of(request(epoch_), event.peer);
    if (leg == legs_.size()) return false;
    switch (event.kind) {
      case EventKind::armed:
        if (initiator_) advance(event, leg, State::idle, State::armed);
        return initiator_;
      case EventKind::confirmed:
        if (initiator_) usable(event, leg);
        return initiator_;
      case EventKind::delivered:
        if (!initiator_) usable(event, leg);
        return !initiator_;
      case EventKind::released:
        if (!prefill_) return false;
        advance(event, leg, State::usable, State::released);
        ++released_;
        return true;
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
  const std::span<const Send> sends_;
  Compute* const compute_;
  const PipelineSettings set_;
  const bool prefill_;
  const bool initiator_;
  const std::uint32_t window_;
  Epochs epochs_;
  Send first_segments_;  // one segment of each leg
  EarlyEvents early_;
  PipelineResult result_;

  // Of the request that moves:
  std::uint64_t epoch_ = 0;
  std::uint64_t first_tag_ = 0;
  std::span<const Send> moving_;
  std::vector<LegProgress> legs_;  // as the request has them
  std::size_t parts_ = 0;          // of all legs' sends; how many of them are
  std::size_t usable_ = 0;
  std::size_t released_ = 0;
  std::vector<Nanoseconds> usable_at_;  // per send
  bool going_ = false;                  // false while the clock of the prefill side does not run yet
  bool computing_ = false;
  std::uint32_t computed_ = 0;
  Nanoseconds began_ = 0;
};

void require_sane(std::span<const LoopRequest> requests, std::span<const Send> sends, const Compute* compute,
                  const PipelineSettings& settings) {
  if (settings.count == 0 || settings.stall_ns <= 0 || sends.size() >= most_sends ||
      settings.count * std::max<std::uint64_t>(1, sends.size()) > most_samples ||
      settings.first_epoch >> (63 - send_bits) != 0)
    throw Error(Fault::usage, "a pipeline needs a count and a stall time, and has less than " +
                                  std::to_string(most_sends) + " sends");
  require_legs(requests);
  if ((settings.side == Side::prefill) != (compute != nullptr))
    throw Error(Fault::usage, "the prefill side computes, and it alone");
  std::uint32_t after = 0;
  for (const Send& send : sends) {
    if (send.segments.size() != requests[0].legs.size() || send.ready_after < after ||
        (compute != nullptr && send.ready_after > compute->units()))
      throw Error(Fault::usage,
                  "a send needs segments of every leg, if only an empty list, and to be ready in its turn");
    after = send.ready_after;
  }
}

}  // namespace

PipelineResult run_pipeline(Context& context, std::span<const LoopRequest> requests, std::span<const Extent> regions,
                            std::span<const Send> sends, Compute* compute, const PipelineSettings& settings) {
  require_sane(requests, sends, compute, settings);
  const PromptTimers prompt;
  return PipelineLoop(context, requests, regions, sends, compute, settings).run();
}

}  // namespace kvxfer
