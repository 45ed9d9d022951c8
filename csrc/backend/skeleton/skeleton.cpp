#include "backend/skeleton/skeleton.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <vector>

#include "backend/lane_context.h"

namespace kvxfer::skeleton {

namespace {

// Two lanes per peer: LanePeer's notices go over lane 0, our bytes over lane 1.
constexpr std::uint16_t lanes = 2;
constexpr std::size_t data_lane = 1;
// How many transfers of a peer may be open. Say what is true: whoever relies on it is refused one more.
constexpr std::uint32_t most_open = 64;
// Payload of one system call, and into how many pieces of memory it may go. What has moved is counted after each call.
constexpr std::uint64_t call_bytes = std::uint64_t{1} << 20;
constexpr std::size_t call_pieces = 64;
// A ready flag may be set by a device that can wake nobody: it is looked at this often.
constexpr auto ready_interval = std::chrono::microseconds(20);

// Precedes the bytes of a transfer on the data lane; so many ranges of the plan follow, then their bytes.
struct Header {
  std::uint64_t tag = 0;
  std::uint32_t plan = 0;
  std::uint32_t ranges = 0;
};

// One peer. All members that two threads use are under LanePeer's mutex_, and nothing is sent or waited for with it.
class SkeletonPeer final : public LanePeer {
 public:
  SkeletonPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> of_peer)
      : LanePeer(events, id, std::move(of_peer)), open_(most_open) {
    // Everything that a transfer needs is there before the first one: nothing allocates while data moves.
    for (Transfer& transfer : open_) transfer.ranges.reserve(16);
    queue_.reserve(most_open);
  }

  // The threads use what is destroyed next.
  ~SkeletonPeer() override { close(); }

  void start() override {
    run([this] { send_transfers(); });
    run([this] { receive_transfers(); });
    LanePeer::start();
  }

  // --- what the application calls

  void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override {
    if (op == Op::pull) throw Error(Fault::usage, "this backend has no pull");
    require_alive();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) throw Error(Fault::peer_lost, "the peer was lost");
      if (find(tag) != nullptr) throw Error(Fault::usage, "tag " + std::to_string(tag) + " is open already");
      const auto unused = std::ranges::find(open_, State::unused, &Transfer::state);
      if (unused == open_.end())
        throw Error(Fault::unavailable, std::to_string(most_open) + " transfers are open, the most of this backend");
      plan.ranges(segments, unused->ranges);  // refuses segments that the plan has not, before anything has changed
      unused->state = State::queued;
      unused->tag = tag;
      unused->plan = &plan;
      unused->ready = ready;
      queue_.push_back(&*unused);
    }
    changed_.notify_all();  // it only hands over: the sending thread does the rest
  }

  // A transfer that is under way is not stopped: its end is `confirmed`, as it may be. One that has not begun is.
  bool cancel(std::uint64_t tag) override {
    Notice notice;
    notice.kind = NoticeKind::cancelled;
    notice.tag = tag;
    {
      const std::lock_guard lock(mutex_);
      Transfer* transfer = find(tag);
      if (transfer == nullptr) return false;
      if (transfer->state != State::queued) return true;
      transfer->state = State::cancelling;
      std::erase(queue_, transfer);
    }
    send(notice);
    return true;
  }

  std::vector<std::string> describe() const override { return {"skeleton/" + interface_of(lanes_[data_lane].fd())}; }
  std::uint64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 protected:
  // --- what the other side says, on the notice thread

  std::string handle(const Notice& notice, std::span<const std::uint32_t>) override {
    if (notice.kind == NoticeKind::cancelled) {  // it never began, and has no other trace on this side
      Notice seen = notice;
      seen.kind = NoticeKind::cancel_seen;
      send(seen);
      emit(EventKind::cancelled, notice.tag);
      return {};
    }
    const bool confirmed = notice.kind == NoticeKind::confirm;
    if (!confirmed && notice.kind != NoticeKind::cancel_seen) return "protocol error: unknown notice";
    {
      const std::lock_guard lock(mutex_);
      Transfer* transfer = find(notice.tag);
      if (transfer == nullptr || transfer->state != (confirmed ? State::sent : State::cancelling))
        return "protocol error: the end of a transfer that is not open";
      transfer->state = State::unused;
    }
    emit(confirmed ? EventKind::confirmed : EventKind::cancelled, notice.tag);
    return {};
  }

  // The peer is lost, or this side closes: whatever is open ends, on either side of a transfer.
  void end_open_transfers() override {
    queue_.clear();
    for (Transfer& transfer : open_)
      if (transfer.state != State::unused) emit_error(transfer.tag);
    for (Transfer& transfer : open_) transfer.state = State::unused;
    if (receiving_) emit_error(*receiving_);
    receiving_.reset();
  }

 private:
  enum class State : std::uint8_t { unused, queued, cancelling, sent };
  enum class Way : std::uint8_t { out, in };

  // A push of this side. `sent` begins with its first byte: from there on only the other side's word ends it.
  struct Transfer {
    State state = State::unused;
    std::uint64_t tag = 0;
    LanePlan* plan = nullptr;
    std::vector<Range> ranges;
    const ReadyFlag* ready = nullptr;
  };

  Transfer* find(std::uint64_t tag) {  // with mutex_ held
    for (Transfer& transfer : open_)
      if (transfer.state != State::unused && transfer.tag == tag) return &transfer;
    return nullptr;
  }

  // --- the sending thread

  void send_transfers() {
    Transfer transfer;
    while (next_to_send(transfer)) {
      if (const int code = send_transfer(transfer)) return fail(closed_or(code));
    }
  }

  // The first whose bytes are ready; false once it is time to stop. A copy: the slot is free again as soon as the other
  // side has confirmed, which may be before this thread is back from its last system call.
  bool next_to_send(Transfer& into) {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (stopping_) return false;
      for (Transfer* transfer : queue_)
        if (transfer->ready == nullptr || transfer->ready->load(std::memory_order_acquire) != 0) {
          std::erase(queue_, transfer);
          transfer->state = State::sent;
          into = *transfer;  // its ranges into room that `into` has already
          return true;
        }
      if (queue_.empty())
        changed_.wait(lock);
      else
        changed_.wait_for(lock, ready_interval);
    }
  }

  // 0, or the error code.
  int send_transfer(const Transfer& transfer) {
    const int fd = lanes_[data_lane].fd();
    Header header{transfer.tag, transfer.plan->id(), static_cast<std::uint32_t>(transfer.ranges.size())};
    iovec head[2] = {{&header, sizeof header},
                     {const_cast<Range*>(transfer.ranges.data()), transfer.ranges.size() * sizeof(Range)}};
    if (const int code = send_vectors(fd, head, 2)) return code;
    for (const Range& range : transfer.ranges)
      if (const int code = move_range(Way::out, *transfer.plan, range)) return code;
    return 0;
  }

  // --- the receiving thread

  void receive_transfers() {
    std::vector<Range> ranges;
    for (;;) {
      if (const std::string wrong = receive_transfer(ranges); !wrong.empty()) return fail(wrong);
    }
  }

  // Nothing that the peer says is believed before it has been held against what this side prepared.
  std::string receive_transfer(std::vector<Range>& ranges) {
    const int fd = lanes_[data_lane].fd();
    Header header;
    if (const int code = receive_all(fd, &header, sizeof header)) return closed_or(code);
    LanePlan* to = nullptr;
    {
      const std::lock_guard lock(mutex_);
      to = plan(header.plan);
      if (to == nullptr) return "protocol error: bytes of an unknown plan";
      if (header.ranges == 0 || header.ranges > std::max(to->segments(), 1U))
        return "protocol error: more ranges than the plan has segments";
      receiving_ = header.tag;
    }
    ranges.resize(header.ranges);
    if (const int code = receive_all(fd, ranges.data(), ranges.size() * sizeof(Range))) return closed_or(code);
    for (const Range& range : ranges) {
      if (range.from > range.to || range.to > to->bytes()) return "protocol error: bytes outside their plan";
      if (const int code = move_range(Way::in, *to, range)) return closed_or(code);
    }
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return "the peer was lost";  // the transfer has ended with an error
      receiving_.reset();
    }
    // The peer first: its clock is running, and what our application does about the event must not overtake the notice.
    const Nanoseconds at = now_ns();
    Notice notice;
    notice.kind = NoticeKind::confirm;
    notice.tag = header.tag;
    send(notice);
    emit(EventKind::delivered, header.tag, at);
    return {};
  }

  // Scatter/gather straight between the blocks and the socket. 0, or the error code.
  int move_range(Way way, const LanePlan& of, const Range& range) {
    const int fd = lanes_[data_lane].fd();
    iovec pieces[call_pieces];
    for (std::uint64_t at = range.from; at < range.to;) {
      const std::uint64_t from = at;
      const std::size_t used = of.pieces(at, std::min(range.to - at, call_bytes), pieces);
      const int code = way == Way::out ? send_vectors(fd, pieces, used) : receive_vectors(fd, pieces, used);
      if (code != 0) return code;
      bytes_moved_.fetch_add(at - from, std::memory_order_relaxed);
    }
    return 0;
  }

  std::vector<Transfer> open_;              // slots, under mutex_
  std::vector<Transfer*> queue_;            // those that have not begun, in order; under mutex_
  std::optional<std::uint64_t> receiving_;  // the tag of the other side's push that is arriving; under mutex_
  std::atomic<std::uint64_t> bytes_moved_{0};
};

// What is true of this backend. The conformance suite holds it to every word of it.
Capabilities abilities() {
  Capabilities c;
  c.one_sided = true;   // the receiving thread does what the passive application would have to
  c.needs_arm = false;  // bytes may come at any time
  c.pull = false;
  c.max_inflight = most_open;
  c.push_confirmed_by = Confirms::target;
  return c;
}

class SkeletonContext final : public LaneContext {
 public:
  explicit SkeletonContext(const Token& token) : LaneContext(abilities(), token, lanes) {}

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> of_peer) override {
    if (of_peer.size() != lanes)
      throw Error(Fault::usage, "the peer opened other data connections: it does not run backend skeleton");
    return std::make_shared<SkeletonPeer>(events, id, std::move(of_peer));
  }
};

}  // namespace

// Where a library has to be opened (dlopen) or a device be found, this says why it cannot be, and what to do about it.
Probe probe() {
  Probe found;
  found.available = true;
  found.library_path = "kernel";
  found.transports = "tcp";
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  refuse_unknown(options, {});  // an option is a row of OptionBounds, see backends/tcp/tcp.cpp
  return std::make_unique<SkeletonContext>(token);
}

}  // namespace kvxfer::skeleton
