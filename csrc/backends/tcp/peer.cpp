#include "backends/tcp/peer.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace kvxfer::tcp {

namespace {

constexpr std::uint32_t chunk_magic = 0x4458564b;
// Most bytes of one system call: what has moved is counted after each, and a slow link must not look like a dead one.
constexpr std::uint64_t call_bytes = std::uint64_t{1} << 20;
// Ranges that a transfer holds without allocating.
constexpr std::size_t ranges_room = 16;
// Into how many chunks a lane's share of a transfer is cut at least, unless they would be smaller than is worth a
// header.
constexpr std::uint64_t chunks_per_lane = 4;
constexpr std::uint64_t least_share = std::uint64_t{64} << 10;
// Chunks of one lane that the kernel may still be reading: 64 MiB of large ones, more than sockets have room for.
constexpr std::size_t max_lent = 64;

void tune(int fd, const Tuning& tuning) {
  // Within a host there is no network to be fair to, and pacing (bbr) costs a third of the CPU time. Every kernel has
  // reno and lets anybody use it; if not, the system's choice stays.
  constexpr std::string_view reno = "reno";
  if (tuning.reno_on_lo && interface_of(fd) == "lo")
    ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, reno.data(), reno.size());
  if (tuning.busy_poll_us > 0)
    ::setsockopt(fd, SOL_SOCKET, SO_BUSY_POLL, &tuning.busy_poll_us, sizeof tuning.busy_poll_us);
  if (tuning.zero_copy) allow_zero_copy(fd);
}

// The header is this thread's and gone at once, so it is copied, to go out with what follows it.
int send_header(int fd, ChunkHeader header) {
  const int flags = MSG_NOSIGNAL | (header.bytes > 0 ? MSG_MORE : 0);
  iovec vector{&header, sizeof header};
  return all_vectors(&vector, 1, [fd, flags](const iovec* from, std::size_t) {
    return ::send(fd, from->iov_base, from->iov_len, flags);
  });
}

}  // namespace

TcpPeer::TcpPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, const Tuning& tuning)
    : LanePeer(events, id, std::move(lanes)),
      tuning_(tuning),
      transfers_(2 * (max_inflight + lanes_.size() * (tuning.zero_copy ? 1 + max_lent : 1))) {
  send_queue_.reserve(transfers_.size());
  for (std::size_t lane = 1; lane < lanes_.size(); ++lane) {
    tune(lanes_[lane].fd(), tuning);
    Sender& sender = senders_.emplace_back();
    sender.lane = lane;
    sender.room.resize(tuning_.pieces_per_call + 1);
    if (tuning_.zero_copy) sender.lent.reserve(max_lent);
  }
}

TcpPeer::~TcpPeer() { close(); }

void TcpPeer::start() {
  for (Sender& sender : senders_) {
    run([this, &sender] {
      keep_to_cpu(sender.lane);
      send_chunks(sender);
    });
    run([this, lane = sender.lane] {
      keep_to_cpu(lane);
      receive_chunks(lane);
    });
    if (!tuning_.zero_copy) continue;
    run([this, &sender] {
      keep_to_cpu(sender.lane);
      await_kernel(sender);
    });
  }
  LanePeer::start();
}

// One of those that this thread may run on. The scheduler likes to wake a thread where its waker runs, and on few or
// busy CPUs that leaves both ends of all lanes on one. Without effect where there are more CPUs than the mask holds.
void TcpPeer::keep_to_cpu(std::size_t lane) const {
  cpu_set_t allowed;
  if (!tuning_.pin || ::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  std::size_t passed = (id() * (lanes_.size() - 1) + lane - 1) % static_cast<std::size_t>(CPU_COUNT(&allowed));
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || passed-- != 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ::pthread_setaffinity_np(::pthread_self(), sizeof one, &one);
    return;
  }
}

std::vector<std::string> TcpPeer::describe() const {
  std::vector<std::string> lanes;
  for (std::size_t lane = 1; lane < lanes_.size(); ++lane) lanes.push_back("tcp/" + interface_of(lanes_[lane].fd()));
  return lanes;
}

// --- transfers -------------------------------------------------------------------------------------------------------

TcpPeer::Transfer* TcpPeer::find(std::uint64_t tag, Role role, Op op) {
  for (std::size_t i = 0; i < used_; ++i) {
    Transfer& t = transfers_[i];
    if (t.open && !t.ended && t.tag == tag && t.role == role && t.op == op) return &t;
  }
  return nullptr;
}

TcpPeer::Transfer* TcpPeer::open_transfer(std::uint64_t tag, Role role, Op op, LanePlan& plan) {
  Transfer* unused = nullptr;
  std::size_t open = 0;
  for (std::size_t i = 0; i < used_; ++i) {
    Transfer& t = transfers_[i];
    if (!t.open && unused == nullptr) unused = &t;
    if (t.open && !t.ended && posted_here(t.role, t.op) == posted_here(role, op)) ++open;
  }
  if (open >= max_inflight) return nullptr;
  if (unused == nullptr) {
    if (used_ == transfers_.size()) return nullptr;
    unused = &transfers_[used_++];
    unused->left.reserve(ranges_room);
  }
  std::vector<Range> room = std::move(unused->left);  // keeps its capacity: no allocation in the steady state
  room.clear();
  *unused = Transfer{};
  unused->left = std::move(room);
  unused->open = true;
  unused->role = role;
  unused->op = op;
  unused->tag = tag;
  unused->plan = &plan;
  return unused;
}

void TcpPeer::free_if_idle(Transfer& transfer) {
  if (transfer.ended && transfer.chunks_out == 0) transfer.open = false;
}

TcpPeer::Outcome TcpPeer::tell(const Transfer& transfer, std::optional<EventKind> event,
                               std::optional<NoticeKind> notice) {
  Outcome outcome{notice, event, {}};
  outcome.content.op = transfer.op;
  outcome.content.plan = transfer.plan->id();
  outcome.content.tag = transfer.tag;
  outcome.content.count = transfer.moved;
  outcome.content.total = transfer.total;
  return outcome;
}

TcpPeer::Outcome TcpPeer::end(Transfer& transfer, EventKind event, std::optional<NoticeKind> notice) {
  transfer.ended = true;
  free_if_idle(transfer);
  return tell(transfer, event, notice);
}

void TcpPeer::end_open_transfers() {
  send_queue_.clear();
  // Before anybody is told that blocks are free: what is lent of them must not be sent, changed, and taken for
  // delivered.
  const auto lent = [](const Transfer& t) { return t.open && !t.ended && t.role == Role::send && t.chunks_out > 0; };
  if (tuning_.zero_copy && std::ranges::any_of(transfers_, lent))
    for (const Sender& sender : senders_) abort_connection(lanes_[sender.lane].fd());
  for (Transfer& t : transfers_) {
    if (!t.open || t.ended) continue;
    t.ended = true;
    emit_error(t.tag);
  }
}

void TcpPeer::perform(const Outcome& outcome) {
  const Nanoseconds at = now_ns();  // what happened has happened; saying so to the peer is not part of it
  // The peer first: its clock may be running, and whatever this side's application does about the event must reach the
  // peer after the notice that the event is about.
  if (outcome.notice) {
    Notice notice = outcome.content;
    notice.kind = *outcome.notice;
    send(notice);
  }
  if (outcome.event) emit(*outcome.event, outcome.content.tag, at);
}

void TcpPeer::post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                   const ReadyFlag* ready) {
  require_alive();
  const Role role = op == Op::push ? Role::send : Role::receive;
  Notice request;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Error(Fault::peer_lost, "the peer was lost");
    if (find(tag, role, op) != nullptr) throw Error(Fault::usage, "tag " + std::to_string(tag) + " is open already");
    Transfer* transfer = open_transfer(tag, role, op, plan);
    if (transfer == nullptr)
      throw Error(Fault::unavailable, std::to_string(max_inflight) + " transfers are open, the most of this backend");
    try {
      plan.ranges(segments, transfer->left);
    } catch (...) {
      transfer->open = false;
      throw;
    }
    for (const Range& range : transfer->left) transfer->total += range.to - range.from;
    if (op == Op::push) {
      transfer->ready = ready;
      queue(*transfer);
    } else {
      transfer->left.clear();
      request.kind = NoticeKind::request;
      request.plan = plan.id();
      request.op = op;
      request.tag = tag;
      request.payload_bytes = segments.size() * sizeof(std::uint32_t);
    }
  }
  if (op == Op::push)
    changed_.notify_all();
  else
    send(request, segments.data());
}

bool TcpPeer::cancel(std::uint64_t tag) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    if (Transfer* push = find(tag, Role::send, Op::push)) {
      if (push->cancelling) return true;  // on its way already
      outcome = stop_sending(*push);
    } else if (Transfer* pull = find(tag, Role::receive, Op::pull)) {
      outcome = tell(*pull, std::nullopt, NoticeKind::cancel_request);
    } else {
      return false;
    }
  }
  perform(outcome);
  return true;
}

// --- sending ---------------------------------------------------------------------------------------------------------

// A small transfer is cut finer, so that all lanes have a share of it and end at about the same time.
void TcpPeer::queue(Transfer& transfer) {
  const std::uint64_t share = transfer.total / (chunks_per_lane * (lanes_.size() - 1));
  transfer.chunk_bytes = std::min(std::max(share, least_share), tuning_.chunk_bytes);
  send_queue_.push_back(&transfer);
}

bool TcpPeer::take_chunk(Chunk& chunk, bool& waits_for_ready) {
  waits_for_ready = false;
  for (auto at = send_queue_.begin(); at != send_queue_.end(); ++at) {
    Transfer& t = **at;
    if (t.ready != nullptr && t.ready->load(std::memory_order_acquire) == 0) {
      waits_for_ready = true;
      continue;
    }
    Range& range = t.left[t.next_left];
    chunk.transfer = &t;
    chunk.header.plan = t.plan->id();
    chunk.header.tag = t.tag;
    chunk.header.op = t.op;
    chunk.header.total = t.total;
    chunk.header.from = range.from;
    chunk.header.bytes = std::min(range.to - range.from, t.chunk_bytes);
    range.from += chunk.header.bytes;
    if (range.from == range.to) ++t.next_left;
    ++t.chunks_out;
    if (t.handed_out()) send_queue_.erase(at);
    return true;
  }
  return false;
}

void TcpPeer::send_chunks(Sender& sender) {
  for (;;) {
    Chunk chunk;
    {
      std::unique_lock lock(mutex_);
      bool waits_for_ready = false;
      while (!stopping_ && (sender.lent.size() == max_lent || !take_chunk(chunk, waits_for_ready))) {
        if (waits_for_ready)
          changed_.wait_for(lock, ready_interval);
        else
          changed_.wait(lock);
      }
      if (stopping_) return;
    }
    const Calls before = sender.calls;
    if (const int code = send_chunk(sender, chunk)) {
      fail(closed_or(code));
      return;
    }
    Outcome outcome;
    {
      const std::lock_guard lock(mutex_);
      if (tuning_.zero_copy)
        lend(sender, chunk, before);
      else
        outcome = chunk_sent(chunk);
    }
    perform(outcome);
    if (tuning_.zero_copy) take_back(sender);
  }
}

int TcpPeer::send_chunk(Sender& sender, const Chunk& chunk) {
  ChunkHeader header = chunk.header;
  std::uint64_t at = header.from;
  const std::uint64_t end = at + header.bytes;
  std::size_t used = 0;
  if (tuning_.zero_copy) {
    if (const int code = send_header(lanes_[sender.lane].fd(), header)) return code;
  } else {
    sender.room[used++] = {&header, sizeof header};
  }
  do {
    const std::uint64_t from = at;
    used += chunk.transfer->plan->pieces(at, std::min(end - at, call_bytes),
                                         {sender.room.data() + used, tuning_.pieces_per_call});
    if (const int code = send_pieces(sender, used)) return code;
    bytes_moved_.fetch_add(at - from, std::memory_order_relaxed);
    used = 0;
  } while (at < end);
  return 0;
}

int TcpPeer::send_pieces(Sender& sender, std::size_t used) {
  const int fd = lanes_[sender.lane].fd();
  return tuning_.zero_copy ? send_in_place(fd, sender.room.data(), used, sender.calls)
                           : send_vectors(fd, sender.room.data(), used);
}

void TcpPeer::lend(Sender& sender, const Chunk& chunk, const Calls& before) {
  sender.lent.push_back({chunk, sender.calls.taken});
  zero_copy_count_.calls += sender.calls.taken - before.taken;
  zero_copy_count_.refused += sender.calls.refused - before.refused;
}

// Hears from the kernel with which calls it is done. Ends with the connection, which the receiving thread tells of.
void TcpPeer::await_kernel(Sender& sender) {
  const int fd = lanes_[sender.lane].fd();
  while (wait_for(fd, 0, Deadline::after(INT64_MAX), -1) == 0) {  // news, and the end, come unasked
    std::size_t news = 0;
    while (const auto done = take_done(fd)) {
      const std::lock_guard lock(mutex_);
      sender.progress.add(*done);
      if (done->copied) zero_copy_count_.copied += done->count();
      ++news;
    }
    if (news == 0) return;
    take_back(sender);
  }
}

// The chunks that the kernel is done with. What the receiver has confirmed need not be waited for: it has read all of
// it, and whatever the kernel might still send is a repetition that its TCP drops.
void TcpPeer::take_back(Sender& sender) {
  for (;;) {
    Outcome outcome;
    {
      const std::lock_guard lock(mutex_);
      if (sender.lent.empty() || !sender.progress.all_below(sender.lent.front().end)) return;
      if (sender.lent.size() == max_lent) changed_.notify_all();
      outcome = chunk_sent(sender.lent.front().chunk);
      sender.lent.erase(sender.lent.begin());
    }
    perform(outcome);
  }
}

ZeroCopyCount TcpPeer::zero_copy_count() const {
  const std::lock_guard lock(mutex_);
  return zero_copy_count_;
}

TcpPeer::Outcome TcpPeer::chunk_sent(const Chunk& chunk) {
  Transfer& t = *chunk.transfer;
  --t.chunks_out;
  t.moved += chunk.header.bytes;
  if (t.ended) {  // confirmed (or lost) before this lane came to say so
    free_if_idle(t);
    return {};
  }
  if (t.cancelling) return stop_sending(t);
  if (t.op == Op::push && t.moved == t.total && t.handed_out()) emit_local(t.tag);
  return {};
}

// Hands out nothing more; tells the receiver where it ends once no lane is writing. Too late when all is handed out.
TcpPeer::Outcome TcpPeer::stop_sending(Transfer& transfer) {
  if (!transfer.cancelling) {
    if (transfer.handed_out()) return {};
    transfer.cancelling = true;
    transfer.next_left = transfer.left.size();
    std::erase(send_queue_, &transfer);
  }
  if (transfer.chunks_out > 0) return {};
  // The target of a push answers with cancel_seen before the initiator may call it ended; in a pull the initiator is
  // told.
  if (transfer.op == Op::pull) return end(transfer, EventKind::cancelled, NoticeKind::cancelled);
  return tell(transfer, std::nullopt, NoticeKind::cancelled);
}

std::string TcpPeer::start_sending(const Notice& notice, std::span<const std::uint32_t> segments) {
  if (notice.op != Op::pull) return "protocol error: a request that is no pull";
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    LanePlan* wanted = plan(notice.plan);
    if (wanted == nullptr) return "protocol error: a pull of an unknown plan";
    if (find(notice.tag, Role::send, Op::pull) != nullptr) return "protocol error: a pull under a tag that is open";
    Transfer* transfer = open_transfer(notice.tag, Role::send, Op::pull, *wanted);
    if (transfer == nullptr) return "protocol error: too many open transfers";
    try {
      wanted->ranges(segments, transfer->left);
    } catch (const Error&) {
      transfer->open = false;
      return "protocol error: a pull of an unknown segment";
    }
    for (const Range& range : transfer->left) transfer->total += range.to - range.from;
    queue(*transfer);
  }
  changed_.notify_all();
  return {};
}

// --- receiving -------------------------------------------------------------------------------------------------------

// Checks a chunk's header against what this side prepared, before a byte of it is written.
std::string TcpPeer::admit(const ChunkHeader& header, LanePlan*& plan_of, Transfer*& transfer) {
  if (header.magic != chunk_magic || (header.op != Op::push && header.op != Op::pull))
    return "protocol error: no chunk header where one belongs";
  plan_of = plan(header.plan);
  if (plan_of == nullptr) return "protocol error: a chunk of an unknown plan";
  const std::uint64_t all = plan_of->bytes();
  if (header.total > all || header.bytes > header.total || header.from > all || header.bytes > all - header.from)
    return "protocol error: a chunk outside its plan";
  if (header.bytes == 0 && header.total != 0) return "protocol error: an empty chunk";
  transfer = find(header.tag, Role::receive, header.op);
  if (transfer == nullptr && header.op == Op::push) {
    transfer = open_transfer(header.tag, Role::receive, Op::push, *plan_of);
    if (transfer == nullptr) return "protocol error: too many open transfers";
    transfer->total = header.total;
  }
  if (transfer == nullptr) return "protocol error: a chunk that nobody asked for";
  const std::uint64_t most = transfer->cancelling ? transfer->stops_at : transfer->total;
  if (transfer->plan != plan_of || transfer->total != header.total || header.bytes > most - transfer->announced)
    return "protocol error: a chunk that does not belong to its transfer";
  transfer->announced += header.bytes;
  ++transfer->chunks_out;
  return {};
}

void TcpPeer::receive_chunks(std::size_t lane) {
  const int fd = lanes_[lane].fd();
  std::vector<iovec> room(tuning_.pieces_per_call);
  for (;;) {
    ChunkHeader header;
    int code = receive_all(fd, &header, sizeof header);
    LanePlan* plan_of = nullptr;
    Transfer* transfer = nullptr;
    std::string wrong;
    if (code == 0) {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      wrong = admit(header, plan_of, transfer);
    }
    if (code == 0 && wrong.empty()) code = receive_chunk(fd, header, *plan_of, room);
    if (code != 0) wrong = closed_or(code);
    if (!wrong.empty()) {
      fail(wrong);
      return;
    }
    Outcome outcome;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      --transfer->chunks_out;
      transfer->moved += header.bytes;
      outcome = settle_received(*transfer);
    }
    perform(outcome);
  }
}

int TcpPeer::receive_chunk(int fd, const ChunkHeader& header, const LanePlan& plan_of, std::vector<iovec>& room) {
  std::uint64_t at = header.from;
  const std::uint64_t end = at + header.bytes;
  while (at < end) {
    const std::uint64_t from = at;
    const std::size_t used = plan_of.pieces(at, std::min(end - at, call_bytes), room);
    if (const int code = receive_vectors(fd, room.data(), used)) return code;
    bytes_moved_.fetch_add(at - from, std::memory_order_relaxed);
  }
  return 0;
}

TcpPeer::Outcome TcpPeer::settle_received(Transfer& transfer) {
  if (transfer.ended) {
    free_if_idle(transfer);
    return {};
  }
  const bool push = transfer.op == Op::push;
  if (transfer.cancelling) {
    if (transfer.moved != transfer.stops_at) return {};
    return end(transfer, EventKind::cancelled, push ? std::optional(NoticeKind::cancel_seen) : std::nullopt);
  }
  if (transfer.moved != transfer.total) return {};
  return push ? end(transfer, EventKind::delivered, NoticeKind::confirm)
              : end(transfer, EventKind::confirmed, NoticeKind::delivered);
}

std::string TcpPeer::sender_stopped(const Notice& notice) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    LanePlan* of = plan(notice.plan);
    if (of == nullptr || notice.total > of->bytes() || notice.count > notice.total)
      return "protocol error: a cancelled transfer of an unknown plan";
    Transfer* transfer = find(notice.tag, Role::receive, notice.op);
    if (transfer == nullptr && notice.op == Op::push) {  // before its first chunk
      transfer = open_transfer(notice.tag, Role::receive, Op::push, *of);
      if (transfer == nullptr) return "protocol error: too many open transfers";
      transfer->total = notice.total;
    }
    if (transfer == nullptr) return "protocol error: a cancelled transfer that is not open";
    if (transfer->cancelling || transfer->plan != of || transfer->total != notice.total ||
        notice.count < transfer->announced)
      return "protocol error: a transfer cancelled twice, or before what has come";
    transfer->cancelling = true;
    transfer->stops_at = notice.count;
    outcome = settle_received(*transfer);
  }
  perform(outcome);
  return {};
}

// --- notices ---------------------------------------------------------------------------------------------------------

std::string TcpPeer::handle(const Notice& notice, std::span<const std::uint32_t> segments) {
  if (notice.kind == NoticeKind::request) return start_sending(notice, segments);
  if (notice.kind == NoticeKind::cancelled) return sender_stopped(notice);
  return answered(notice);
}

// The receiver's word on a transfer that this side sends. A tag that is not open (any more) is no error: answers may
// cross.
std::string TcpPeer::answered(const Notice& notice) {
  const bool push = notice.kind == NoticeKind::confirm || notice.kind == NoticeKind::cancel_seen;
  if (!push && notice.kind != NoticeKind::delivered && notice.kind != NoticeKind::cancel_request)
    return "protocol error: unknown notice";
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    Transfer* transfer = find(notice.tag, Role::send, push ? Op::push : Op::pull);
    if (transfer == nullptr) return {};
    if (notice.kind == NoticeKind::cancel_request) {
      outcome = stop_sending(*transfer);
    } else if (notice.kind == NoticeKind::cancel_seen) {
      if (!transfer->cancelling || transfer->chunks_out > 0) return "protocol error: a cancel that nobody asked for";
      outcome = end(*transfer, EventKind::cancelled, std::nullopt);
    } else {
      if (transfer->cancelling || !transfer->handed_out()) return "protocol error: bytes confirmed that were not sent";
      outcome = end(*transfer, push ? EventKind::confirmed : EventKind::delivered, std::nullopt);
    }
  }
  perform(outcome);
  return {};
}

}  // namespace kvxfer::tcp
