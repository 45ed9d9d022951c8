#include "backend/copy_peer.h"

#include <algorithm>

#include "memory/copy.h"

namespace kvxfer {

namespace {

constexpr std::uint64_t largest_chunk = std::uint64_t{1} << 20;
// A request below twice this is not worth waking a second thread for.
constexpr std::uint64_t least_chunk = std::uint64_t{256} << 10;
// Into how many chunks a thread's share of a request is cut at least, so that all threads end at about the same time.
constexpr std::uint64_t chunks_per_thread = 4;
// Ranges that a transfer holds without allocating.
constexpr std::size_t ranges_room = 16;
// The other side sees nothing move by itself: it is told this often, so that slow is not taken for dead.
constexpr Nanoseconds progress_interval = 100'000'000;
// A peer that is closing waits for the copies under way in its memory, and one chunk takes far less; so its answer
// comes at once, unless it is stopped or gone.
constexpr auto farewell_patience = std::chrono::seconds(1);

std::uint64_t chunk_for(std::uint64_t total, std::size_t threads) {
  const std::uint64_t share = total / (chunks_per_thread * threads);
  return threads == 1 || total < 2 * least_chunk ? largest_chunk : std::clamp(share, least_chunk, largest_chunk);
}

}  // namespace

CopyPeer::CopyPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, Effort effort)
    : LanePeer(events, id, std::move(lanes)), effort_(effort), cache_bytes_(cache_bytes()), transfers_(max_inflight) {
  queue_.reserve(max_inflight);
  for (Transfer& transfer : transfers_) transfer.left.reserve(ranges_room);
}

void CopyPeer::start() {
  for (std::size_t i = 0; i < effort_.threads; ++i) run([this] { copy_chunks(); });
  LanePeer::start();
}

// --- transfers -------------------------------------------------------------------------------------------------------

CopyPeer::Transfer* CopyPeer::find(std::uint64_t tag) {
  const auto found =
      std::find_if(transfers_.begin(), transfers_.end(), [tag](const Transfer& t) { return t.open && t.tag == tag; });
  return found == transfers_.end() ? nullptr : &*found;
}

CopyPeer::Transfer& CopyPeer::open_transfer(LanePlan& plan, Op op, std::span<const std::uint32_t> segments,
                                            std::uint64_t tag) {
  if (find(tag) != nullptr) throw Error(Fault::usage, "tag " + std::to_string(tag) + " is open already");
  const auto unused = std::find_if(transfers_.begin(), transfers_.end(), [](const Transfer& t) { return !t.open; });
  if (unused == transfers_.end())
    throw Error(Fault::unavailable, std::to_string(max_inflight) + " transfers are open, the most of this backend");
  plan.ranges(segments, unused->left);
  Transfer fresh;
  fresh.left = std::move(unused->left);  // keeps its capacity: no allocation in the steady state
  for (const Range& range : fresh.left) fresh.total += range.to - range.from;
  fresh.open = true;
  fresh.op = op;
  fresh.tag = tag;
  fresh.plan = &plan;
  fresh.chunk_bytes = chunk_for(fresh.total, effort_.threads);
  fresh.told_at = now_ns();
  *unused = std::move(fresh);
  return *unused;
}

void CopyPeer::end_open_transfers() {
  queue_.clear();
  for (Transfer& t : transfers_) {
    if (!t.open) continue;
    t.lost = true;
    end_in_error(t);
  }
  work_.notify_all();
}

// Whoever is told may free the memory: not while a thread still copies there.
void CopyPeer::end_in_error(Transfer& transfer) {
  if (transfer.chunks_out > 0) return;
  transfer.open = false;
  emit_error(transfer.tag);
}

void CopyPeer::post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                    const ReadyFlag* ready) {
  require_alive();
  bool shared = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Error(Fault::peer_lost, "the peer was lost");
    Transfer& transfer = open_transfer(plan, op, segments, tag);
    transfer.ready = ready;
    queue_.push_back(&transfer);
    shared = transfer.total > transfer.chunk_bytes;
  }
  if (shared)
    work_.notify_all();
  else
    work_.notify_one();
}

bool CopyPeer::cancel(std::uint64_t tag) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    Transfer* transfer = find(tag);
    if (transfer == nullptr) return false;
    if (!transfer->cancelling) outcome = stop(*transfer);
  }
  perform(outcome);
  return true;
}

// Hands out nothing more; it ends once no thread copies any of it. Too late when the other side is being told.
CopyPeer::Outcome CopyPeer::stop(Transfer& transfer) {
  if (transfer.copied) return {};
  if (!transfer.cancelling) {
    transfer.cancelling = true;
    transfer.next_left = transfer.left.size();
    std::erase(queue_, &transfer);
  }
  if (transfer.chunks_out > 0) return {};
  transfer.open = false;
  return {false, about(transfer, NoticeKind::cancelled), EventKind::cancelled, transfer.tag};
}

Notice CopyPeer::about(Transfer& transfer, NoticeKind kind) {
  Notice notice;
  notice.kind = kind;
  notice.plan = transfer.plan->id();
  notice.op = transfer.op;
  notice.tag = transfer.tag;
  notice.count = transfer.done - transfer.told;
  notice.total = transfer.total;
  transfer.told = transfer.done;
  return notice;
}

void CopyPeer::perform(const Outcome& outcome) {
  const Nanoseconds at = now_ns();  // what happened has happened; saying so to the peer is not part of it
  // Only this is no news to the peer. It comes first, or the peer's answer might overtake it.
  if (outcome.local) emit(EventKind::local, outcome.tag, at);
  if (outcome.notice) send(*outcome.notice);
  if (outcome.event) emit(*outcome.event, outcome.tag, at);
}

// --- copying ---------------------------------------------------------------------------------------------------------

bool CopyPeer::take_chunk(Chunk& chunk, bool& waits_for_ready) {
  waits_for_ready = false;
  if (no_more_) return false;
  for (auto at = queue_.begin(); at != queue_.end(); ++at) {
    Transfer& t = **at;
    if (t.ready != nullptr && t.ready->load(std::memory_order_acquire) == 0) {
      waits_for_ready = true;
      continue;
    }
    Range& range = t.left[t.next_left];
    chunk.transfer = &t;
    chunk.range = {range.from, std::min(range.to, range.from + t.chunk_bytes)};
    range.from = chunk.range.to;
    if (range.from == range.to) ++t.next_left;
    ++t.chunks_out;
    if (t.handed_out()) queue_.erase(at);
    return true;
  }
  return false;
}

void CopyPeer::copy_chunks() {
  std::vector<iovec> local(effort_.pieces_per_call), remote(effort_.pieces_per_call);
  std::unique_lock lock(mutex_);
  for (;;) {
    Chunk chunk;
    bool waits_for_ready = false;
    while (!stopping_ && !take_chunk(chunk, waits_for_ready)) {
      if (waits_for_ready)
        work_.wait_for(lock, ready_interval);
      else
        work_.wait(lock);
    }
    if (stopping_) return;
    ++copying_;
    lock.unlock();
    const int code = copy_chunk(chunk, local, remote);
    lock.lock();
    if (--copying_ == 0) idle_.notify_all();
    if (chunk.transfer->lost) {
      --chunk.transfer->chunks_out;
      end_in_error(*chunk.transfer);
    }
    if (stopping_) return;
    Outcome outcome;
    if (code == 0) outcome = chunk_done(chunk);
    lock.unlock();
    if (code != 0) return give_up(chunk, code);
    perform(outcome);
    lock.lock();
  }
}

void CopyPeer::give_up(const Chunk& chunk, int code) {
  {
    const std::lock_guard lock(mutex_);
    --chunk.transfer->chunks_out;
    if (chunk.transfer->lost) end_in_error(*chunk.transfer);
  }
  fail(why_not_copied(code));
}

int CopyPeer::copy_chunk(const Chunk& chunk, std::span<iovec> local, std::span<iovec> remote) {
  const Transfer& transfer = *chunk.transfer;  // what is read of it here stays as it is while it is open
  const bool past_caches = transfer.total >= cache_bytes_;
  std::uint64_t at = chunk.range.from;
  while (at < chunk.range.to) {
    const std::uint64_t from = at;
    const std::size_t n = transfer.plan->pieces(at, chunk.range.to - at, local, remote);
    if (const int code = copy(transfer.op, local.first(n), remote.first(n), past_caches)) return code;
    bytes_moved_.fetch_add(at - from, std::memory_order_relaxed);
  }
  // The bytes come before the word that they are there.
  std::atomic_thread_fence(std::memory_order_release);
  return 0;
}

CopyPeer::Outcome CopyPeer::chunk_done(const Chunk& chunk) {
  Transfer& t = *chunk.transfer;
  --t.chunks_out;
  t.done += chunk.range.to - chunk.range.from;
  if (t.cancelling) return stop(t);
  if (t.done < t.total || !t.handed_out() || t.chunks_out > 0) {
    const Nanoseconds now = now_ns();
    if (now - t.told_at < progress_interval) return {};
    t.told_at = now;
    return {false, about(t, NoticeKind::progress), std::nullopt, t.tag};
  }
  t.copied = true;
  if (t.op == Op::push) return {true, about(t, NoticeKind::written), std::nullopt, t.tag};
  t.open = false;
  return {false, about(t, NoticeKind::delivered), EventKind::confirmed, t.tag};
}

// Lets no thread begin another chunk, and waits until none copies.
void CopyPeer::let_go(Parting) noexcept {
  std::unique_lock lock(mutex_);
  no_more_ = true;
  idle_.wait_for(lock, farewell_patience, [this] { return copying_ == 0; });
}

void CopyPeer::await_peer() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, farewell_patience, [this] { return notices_over_; });
}

// --- notices ---------------------------------------------------------------------------------------------------------

std::string CopyPeer::handle(const Notice& notice, std::span<const std::uint32_t>) {
  switch (notice.kind) {
    case NoticeKind::confirm:
      return was_confirmed(notice);
    case NoticeKind::progress:
    case NoticeKind::written:
    case NoticeKind::delivered:
    case NoticeKind::cancelled:
      return was_written(notice);
    default:
      return "protocol error: unknown notice";
  }
}

// The initiator's word on a transfer that this side has had no part in.
std::string CopyPeer::was_written(const Notice& notice) {
  const bool wrong_op = (notice.kind == NoticeKind::written && notice.op != Op::push) ||
                        (notice.kind == NoticeKind::delivered && notice.op != Op::pull);
  {
    const std::lock_guard lock(mutex_);
    const LanePlan* of = plan(notice.plan);
    if (wrong_op || of == nullptr || notice.total > of->bytes() || notice.count > notice.total)
      return "protocol error: bytes copied that no plan has";
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  bytes_moved_.fetch_add(notice.count, std::memory_order_relaxed);
  if (notice.kind == NoticeKind::progress) return {};
  Outcome outcome{false, std::nullopt, EventKind::delivered, notice.tag};
  if (notice.kind == NoticeKind::cancelled) outcome.event = EventKind::cancelled;
  if (notice.kind == NoticeKind::written) {
    outcome.notice = notice;
    outcome.notice->kind = NoticeKind::confirm;
  }
  perform(outcome);
  return {};
}

std::string CopyPeer::was_confirmed(const Notice& notice) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    Transfer* transfer = find(notice.tag);
    if (transfer == nullptr || transfer->op != Op::push || !transfer->copied)
      return "protocol error: bytes confirmed that were not written";
    transfer->open = false;
  }
  emit(EventKind::confirmed, notice.tag);
  return {};
}

}  // namespace kvxfer
