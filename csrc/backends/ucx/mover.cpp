// What the thread of one endpoint does: it hands pieces to UCX, lets it work, and says when all has come to an end.
#include <sched.h>

#include <algorithm>
#include <new>
#include <string>

#include "backends/ucx/peer.h"
#include "backends/ucx/transport.h"

namespace kvxfer::ucx {

namespace {

// So many pieces are given to UCX before it is let work.
constexpr std::uint32_t pieces_per_turn = 32;
// The side that moves nothing is told this often that something moves, so that slow is not taken for dead.
constexpr Nanoseconds progress_interval = 100'000'000;
constexpr Nanoseconds longest_sleep = 1'000'000'000;
// What is under way when this side closes, or gives the peer up, has so long to end.
constexpr Nanoseconds parting_patience = 1'000'000'000;
constexpr unsigned message_id = 1;
constexpr std::uint32_t always_a_request = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;

std::string why_lost(ucs_status_t status) {
  const bool not_able = status == UCS_ERR_UNSUPPORTED || status == UCS_ERR_NOT_IMPLEMENTED;
  return why(not_able ? "UCX cannot put or get pieces as it is set (UCX_...)" : "UCX lost the peer", status);
}

}  // namespace

thread_local UcxPeer::Mover* UcxPeer::moved_here_ = nullptr;

UcxPeer::Mover* UcxPeer::own_mover() const {
  return moved_here_ != nullptr && &moved_here_->peer == this ? moved_here_ : nullptr;
}

void UcxPeer::move(Mover& mover) {
  moved_here_ = &mover;
  std::optional<Parting> parting;
  std::string wrong;
  try {
    parting = move_until_parting(mover);
    if (parting == Parting::in_order) part_in_order(mover);
    if (!parting) wrong = mover.broken.empty() ? why_lost(mover.endpoint.status()) : mover.broken;
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  if (!parting) set_cause(wrong);
  end(mover);
  moved_here_ = nullptr;  // fail() waits for the others: the peer is lost once nobody moves anything for it
  if (!parting) fail(wrong);
}

// Nothing: it is this endpoint, or what came over it, that ends the peer.
std::optional<Parting> UcxPeer::move_until_parting(Mover& mover) {
  for (;;) {
    bool waits_for_ready = false;
    bool busy = mover.endpoint.progress();
    // UCX may end the process when it is asked for more on an endpoint that has failed.
    if (mover.endpoint.status() != UCS_OK || !mover.broken.empty()) return std::nullopt;
    if (mover.attention.exchange(false, std::memory_order_seq_cst)) {
      listen_to_others(mover);
      busy = true;
    }
    if (mover.parting) return mover.parting;
    busy |= hand_to_ucx(mover, waits_for_ready);
    tell_progress(mover);
    busy |= finish_parts(mover);
    if (mover.number == 0) busy |= send_messages(mover);
    if (busy) {
      if (mover.patience.waits()) mover.patience.news(now_ns());
    } else if (mover.patience.ask_again(now_ns())) {
      ::sched_yield();  // the other side may have to run here
    } else {
      mover.endpoint.sleep(waits_for_ready ? std::chrono::nanoseconds(ready_interval).count() : longest_sleep,
                           [&] { return !mover.attention.load(std::memory_order_seq_cst); });
    }
  }
}

// What other threads have left under the lock.
void UcxPeer::listen_to_others(Mover& mover) {
  std::function<void()>* job = nullptr;
  {
    const std::lock_guard lock(mutex_);
    job = mover.job;
    mover.parting = parting_;
    mover.hungry = !queue_.empty();
  }
  if (job == nullptr) return;
  (*job)();
  {
    const std::lock_guard lock(mutex_);
    mover.job = nullptr;
  }
  changed_.notify_all();
}

// --- pieces ----------------------------------------------------------------------------------------------------------

bool UcxPeer::hand_to_ucx(Mover& mover, bool& waits_for_ready) {
  std::uint32_t handed = 0;
  while (mover.outstanding < settings_.window && handed < pieces_per_turn && mover.endpoint.status() == UCS_OK) {
    if (mover.next_piece == mover.pieces) {
      if (mover.chunk.from == mover.chunk.to) {
        mover.part = nullptr;
        if (!mover.hungry || !take_chunk(mover, waits_for_ready)) break;
      }
      mover.pieces = mover.part->transfer->plan->pieces(mover.chunk.from, mover.chunk.to - mover.chunk.from, mover.here,
                                                        mover.there);
      mover.next_piece = 0;
      if (mover.pieces == 0) continue;
    }
    const std::size_t i = mover.next_piece++;
    if (mover.here[i].iov_len != 0) hand_over_piece(mover, mover.here[i], mover.there[i]);
    ++handed;
  }
  // A chunk whose last piece is with UCX is this endpoint's no more.
  if (mover.next_piece == mover.pieces && mover.chunk.from == mover.chunk.to) mover.part = nullptr;
  return handed > 0;
}

void UcxPeer::hand_over_piece(Mover& mover, const iovec& here, const iovec& there) {
  const auto from = reinterpret_cast<std::uint64_t>(here.iov_base),
             to = reinterpret_cast<std::uint64_t>(there.iov_base);
  const Pool* const own = holding(mover.local, mover.last_local, from, here.iov_len);
  const RemotePool* const other = holding(mover.remote, mover.last_remote, to, here.iov_len);
  if (own == nullptr || other == nullptr) return mover.endpoint.fail(UCS_ERR_INVALID_ADDR);
  Part& part = *mover.part;
  Request& made = *mover.unused.back();
  mover.unused.pop_back();  // before the call, in which others, and with a request always it itself, may come back
  const Kind kind{part.transfer->gets(), here.iov_len, own->kind};
  made = {&part, here.iov_len, asks_about(mover, kind)};
  mover.put_param.user_data = &made;
  mover.put_param.memh = own->handle;  // from which UCX knows what kind of memory it is
  const auto hand_over = [&, to_peer = mover.endpoint.get()] {
    return kind.gets ? library_.ucp_get_nbx(to_peer, here.iov_base, here.iov_len, to, other->key, &mover.put_param)
                     : library_.ucp_put_nbx(to_peer, here.iov_base, here.iov_len, to, other->key, &mover.put_param);
  };
  ucs_status_ptr_t request = UCS_STATUS_PTR(UCS_ERR_UNSUPPORTED);
  if (made.asked_about) {
    mover.put_param.op_attr_mask |= always_a_request;
    request = hand_over();
    mover.put_param.op_attr_mask &= ~always_a_request;
  }
  if (request == UCS_STATUS_PTR(UCS_ERR_UNSUPPORTED)) request = hand_over();  // not asked about, or cannot be
  if (request == nullptr || UCS_PTR_IS_ERR(request)) mover.unused.push_back(&made);
  if (UCS_PTR_IS_ERR(request)) return mover.endpoint.fail(UCS_PTR_STATUS(request));
  if (request == nullptr) return moved(part, here.iov_len);
  ++mover.outstanding;
  ++part.outstanding;
}

// About the first piece of each kind: UCX tells how a request goes, and a piece that has none cannot be asked about.
bool UcxPeer::asks_about(Mover& mover, Kind kind) {
  if (mover.kinds.size() == most_kinds || std::ranges::find(mover.kinds, kind) != mover.kinds.end()) return false;
  mover.kinds.push_back(kind);
  return true;
}

void UcxPeer::learn_how(Mover& mover, bool gets, void* handle) noexcept {
  try {
    const auto protocol = protocol_of(library_, handle);
    if (!protocol) return;
    const std::lock_guard lock(mutex_);
    add(mover.carried, protocol->transport);
    add(mover.how, (gets ? "get " : "put ") + protocol->how, ", ");
  } catch (const std::bad_alloc&) {  // then it stays with what its lanes are
  }
}

void UcxPeer::on_moved(void* handle, ucs_status_t status, void* user_data) {
  auto& request = *static_cast<Request*>(user_data);
  Part& part = *request.part;
  Mover& mover = *part.mover;
  mover.unused.push_back(&request);
  --part.outstanding;  // to be counted yet, where it comes back before the call has returned
  --mover.outstanding;
  if (status == UCS_OK && request.asked_about) mover.peer.learn_how(mover, part.transfer->gets(), handle);
  if (status == UCS_OK)
    mover.peer.moved(part, request.bytes);
  else
    mover.endpoint.fail(status);
  mover.peer.library_.ucp_request_free(handle);
}

void UcxPeer::moved(Part& part, std::uint64_t bytes) {
  part.transfer->done.fetch_add(bytes, std::memory_order_relaxed);
  bytes_moved_.fetch_add(bytes, std::memory_order_relaxed);
}

void UcxPeer::tell_progress(Mover& mover) {
  if (mover.touched.empty()) return;
  const Nanoseconds now = now_ns();
  if (now - mover.looked_at < progress_interval) return;
  mover.looked_at = now;
  for (const Part* part : mover.touched) {
    Transfer& transfer = *part->transfer;
    Outcome outcome;
    {
      const std::lock_guard lock(mutex_);
      if (transfer.done == transfer.told || now - transfer.told_at < progress_interval) continue;
      transfer.told_at = now;
      outcome.notice = about(transfer, NoticeKind::progress);
    }
    perform(outcome);
  }
}

bool UcxPeer::take_chunk(Mover& mover, bool& waits_for_ready) {
  waits_for_ready = false;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::find_if(queue_, [](const Transfer* t) {
      return t->ready == nullptr || t->ready->load(std::memory_order_acquire) != 0;
    });
    if (at == queue_.end()) {
      waits_for_ready = !queue_.empty();
      mover.hungry = waits_for_ready;
      return false;
    }
    Transfer& transfer = **at;
    Range& range = transfer.left[transfer.next_left];
    mover.chunk = {range.from, std::min(range.to, range.from + transfer.chunk_bytes)};
    range.from = mover.chunk.to;
    if (range.from == range.to) ++transfer.next_left;
    mover.part = &transfer.parts[mover.number];
    if (!mover.part->open) {
      mover.part->open = true;
      ++transfer.parts_open;
      mover.touched.push_back(mover.part);
    }
    if (transfer.next_left == transfer.left.size()) {
      transfer.handed_out = true;
      queue_.erase(at);
    }
  }
  if (movers_.size() > 1 && mover.part->transfer->handed_out) alert_all();  // others may have an end to tell
  return true;
}

bool UcxPeer::finish_parts(Mover& mover) {
  bool busy = false;
  for (std::size_t i = 0; i < mover.touched.size();) {
    Part& part = *mover.touched[i];
    if (&part == mover.part || !part.transfer->handed_out) {
      ++i;
      continue;
    }
    const bool gets = part.transfer->gets();
    if (!gets && !part.flushing) {
      flush(mover, part);
      busy = true;
    }
    if (part.outstanding > 0 || (!gets && !part.flushed)) {
      ++i;
      continue;
    }
    mover.touched.erase(mover.touched.begin() + static_cast<std::ptrdiff_t>(i));
    part_done(part);
    busy = true;
  }
  return busy;
}

// Until every byte of this endpoint's share is in place at the other side.
void UcxPeer::flush(Mover& mover, Part& part) {
  if (mover.endpoint.status() != UCS_OK) return;
  part.flushing = true;
  mover.flush_param.user_data = &part;
  const ucs_status_ptr_t request = library_.ucp_ep_flush_nbx(mover.endpoint.get(), &mover.flush_param);
  if (UCS_PTR_IS_ERR(request)) return mover.endpoint.fail(UCS_PTR_STATUS(request));
  part.flushed = request == nullptr;
  if (request != nullptr) ++mover.outstanding;
}

void UcxPeer::on_flushed(void* request, ucs_status_t status, void* user_data) {
  Part& part = *static_cast<Part*>(user_data);
  --part.mover->outstanding;
  part.flushed = status == UCS_OK;
  if (status != UCS_OK) part.mover->endpoint.fail(status);
  part.mover->peer.library_.ucp_request_free(request);
}

void UcxPeer::part_done(Part& part) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    Transfer& transfer = *part.transfer;
    part.open = part.flushing = part.flushed = false;
    if (--transfer.parts_open == 0) outcome = settle(transfer);
  }
  perform(outcome);
}

// --- messages --------------------------------------------------------------------------------------------------------

bool UcxPeer::send_messages(Mover& mover) {
  {
    const std::lock_guard lock(messages_mutex_);
    sending_.reserve(outgoing_.capacity());  // which it will be: nothing is to grow while data moves
    std::swap(outgoing_, sending_);
  }
  for (Message* message : sending_) send_message(mover, *message);
  const bool sent = !sending_.empty();
  sending_.clear();
  return sent;
}

void UcxPeer::send_message(Mover& mover, Message& message) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = on_sent;
  param.user_data = &message;
  ucs_status_ptr_t request = nullptr;
  if (mover.endpoint.status() == UCS_OK)
    request =
        library_.ucp_am_send_nbx(mover.endpoint.get(), message_id, &message.notice, sizeof message.notice,
                                 message.segments.data(), message.segments.size() * sizeof(std::uint32_t), &param);
  if (UCS_PTR_IS_ERR(request)) mover.endpoint.fail(UCS_PTR_STATUS(request));
  if (UCS_PTR_IS_PTR(request)) {
    ++messages_under_way_;
    return;
  }
  const std::lock_guard lock(messages_mutex_);
  unused_.push_back(&message);
}

void UcxPeer::on_sent(void* request, ucs_status_t status, void* user_data) {
  Message& message = *static_cast<Message*>(user_data);
  UcxPeer& peer = *message.peer;
  --peer.messages_under_way_;
  if (status != UCS_OK) peer.movers_.front()->endpoint.fail(status);
  peer.library_.ucp_request_free(request);
  const std::lock_guard lock(peer.messages_mutex_);
  peer.unused_.push_back(&message);
}

// --- the end ---------------------------------------------------------------------------------------------------------

template <typename Done>
void UcxPeer::progress_mover(Mover& mover, const Done& done, Deadline deadline) {
  while (!done() && !deadline.passed() && mover.endpoint.status() == UCS_OK) {
    const bool news = mover.attention.exchange(false, std::memory_order_seq_cst);
    if (!mover.endpoint.progress() && !news)
      mover.endpoint.sleep(10'000'000, [&] { return !mover.attention.load(std::memory_order_seq_cst); });
  }
}

// This side closes: what is under way comes to its end, the peer hears all that there was to say, and then that it was
// the last. Its endpoint lives on until the peer has answered, or until nobody waits for that any more.
void UcxPeer::part_in_order(Mover& mover) {
  progress_mover(mover, [&] { return mover.outstanding == 0; }, Deadline::after(parting_patience));
  if (mover.outstanding > 0) return;
  mark_ended(mover, false);
  const auto locked = [this](const auto& condition) {
    const std::lock_guard lock(mutex_);
    return condition();
  };
  if (mover.number == 0) {
    const Deadline deadline = Deadline::after(parting_patience);
    progress_mover(mover, [&] { return locked([this] { return all_ended(); }); }, deadline);
    Notice bye;
    bye.kind = NoticeKind::bye;
    send(bye, nullptr, -1);
    send_messages(mover);
    progress_mover(mover, [this] { return messages_under_way_ == 0; }, deadline);
    if (messages_under_way_ == 0 && mover.endpoint.status() == UCS_OK) {
      {
        const std::lock_guard lock(mutex_);
        bye_sent_ = true;
      }
      changed_.notify_all();
    }
  }
  progress_mover(
      mover,
      [&] {
        if (mover.number == 0 && !mover.broken.empty()) set_notices_over();  // the peer's own last word
        return locked([this] { return all_over_; });
      },
      Deadline::after(4 * parting_patience));
}

void UcxPeer::set_notices_over() {
  {
    const std::lock_guard lock(mutex_);
    if (notices_over_) return;
    notices_over_ = true;
  }
  changed_.notify_all();
}

void UcxPeer::mark_ended(Mover& mover, bool gone) {
  {
    const std::lock_guard lock(mutex_);
    mover.ended = true;
    mover.gone = gone;
    if (stopping_) end_in_error();
  }
  changed_.notify_all();
  alert(*movers_.front());
}

// Nothing of this endpoint's is under way afterwards, unless UCX does not get done with it.
void UcxPeer::end(Mover& mover) {
  const Deadline deadline = Deadline::after(parting_patience);
  mover.endpoint.close(true, deadline);
  while ((mover.outstanding > 0 || (mover.number == 0 && messages_under_way_ > 0)) && !deadline.passed())
    mover.endpoint.progress();
  if (mover.outstanding == 0)  // what UCX is not done with may still look at them
    for (const RemotePool& pool : mover.remote) library_.ucp_rkey_destroy(pool.key);
  if (mover.outstanding > 0 || (mover.number == 0 && messages_under_way_ > 0)) mover.endpoint.give_up();
  mover.remote.clear();
  mover.endpoint.destroy();
  mark_ended(mover, true);
}

}  // namespace kvxfer::ucx
