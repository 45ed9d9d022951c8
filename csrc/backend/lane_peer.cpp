#include "backend/lane_peer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace kvxfer {

namespace {

constexpr std::uint32_t notice_magic = 0x4e58564b;
constexpr std::uint32_t keys_magic = 0x4b58564b;  // "KVXK"
constexpr std::size_t max_early_prepares = 1024;
constexpr std::size_t descriptors_per_read = 8192;

// A peer that takes none of our notices for so long (a stopped process) is given up: whoever sends one would wait for
// ever.
constexpr timeval notice_patience{5, 0};

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

std::string closed_or(int code) {
  if (code == ECONNRESET || code == EPIPE) return "the peer closed the connection";
  if (code == EAGAIN) return "the peer reads no notices";
  return std::strerror(code);
}

LanePlan::LanePlan(LanePeer& peer, std::uint32_t id, std::vector<iovec> pieces, std::vector<std::byte*> remote,
                   std::span<const std::uint32_t> segment_starts)
    : peer_(peer),
      id_(id),
      pieces_(std::move(pieces)),
      remote_(std::move(remote)),
      segment_starts_(segment_starts.begin(), segment_starts.end()) {
  starts_.reserve(pieces_.size() + 1);
  starts_.push_back(0);
  for (const iovec& piece : pieces_) starts_.push_back(starts_.back() + piece.iov_len);
}

std::uint32_t LanePlan::peer_id() const { return peer_.id(); }

void LanePlan::ranges(std::span<const std::uint32_t> segments, std::vector<Range>& into) const {
  into.clear();
  if (segments.size() > segment_starts_.size())
    throw Error(Fault::usage,
                std::to_string(segments.size()) + " segments of a plan with " + std::to_string(segment_starts_.size()));
  if (segments.empty()) {
    into.push_back({0, bytes()});
    return;
  }
  std::uint64_t total = 0;
  for (const std::uint32_t segment : segments) {
    if (segment >= segment_starts_.size())
      throw Error(Fault::usage,
                  "segment " + std::to_string(segment) + " of a plan with " + std::to_string(segment_starts_.size()));
    const bool last = segment + 1 == segment_starts_.size();
    const std::uint64_t from = starts_[segment_starts_[segment]];
    const std::uint64_t to = last ? bytes() : starts_[segment_starts_[segment + 1]];
    total += to - from;
    if (total > bytes()) throw Error(Fault::usage, "segment " + std::to_string(segment) + " is named twice");
    if (!into.empty() && into.back().to == from)
      into.back().to = to;
    else if (from < to)
      into.push_back({from, to});
  }
  if (into.empty()) into.push_back({0, 0});
}

std::size_t LanePlan::pieces(std::uint64_t& at, std::uint64_t limit, std::span<iovec> into,
                             std::span<iovec> remote) const {
  if (limit == 0) return 0;
  auto piece = static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
  std::size_t count = 0;
  while (limit > 0 && count < into.size() && piece < pieces_.size()) {
    const std::uint64_t skip = at - starts_[piece];
    const std::uint64_t here = std::min<std::uint64_t>(pieces_[piece].iov_len - skip, limit);
    into[count] = {static_cast<char*>(pieces_[piece].iov_base) + skip, here};
    if (!remote.empty()) remote[count] = {remote_[piece] + skip, here};
    ++count;
    at += here;
    limit -= here;
    ++piece;
  }
  return count;
}

LanePeer::LanePeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes)
    : lanes_(std::move(lanes)), events_(events), id_(id) {
  ::setsockopt(lanes_[0].fd(), SOL_SOCKET, SO_SNDTIMEO, &notice_patience, sizeof notice_patience);
  events_.reserve(max_last_events);
}

// Derived classes have closed by now: close() needs their end_open_transfers().
LanePeer::~LanePeer() = default;

void LanePeer::run(std::function<void()> body) {
  const SignalsBlocked blocked;  // a new thread inherits that
  threads_.emplace_back([this, run_body = std::move(body)] {
    try {
      run_body();
    } catch (const std::exception& error) {
      fail(error.what());
    }
  });
}

void LanePeer::start() {
  run([this] { read_notices(); });
}

// Where that would mean to wait, since another thread sends and may be stuck (the peer reads nothing), the end of what
// is sent has to say it.
void LanePeer::say_bye() noexcept {
  const std::unique_lock lock(send_mutex_, std::try_to_lock);
  Notice bye;
  bye.kind = NoticeKind::bye;
  if (!lock || ::send(lanes_[0].fd(), &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof bye)
    ::shutdown(lanes_[0].fd(), SHUT_WR);
}

void LanePeer::close() noexcept {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = !stopping_;
    stopping_ = true;
    if (lost_.empty()) set_lost("this side closed the connection");
    if (first) end_open_transfers();
  }
  changed_.notify_all();
  if (first) {
    let_go(Parting::in_order);
    say_bye();
    await_peer();
  }
  for (const Socket& lane : lanes_) lane.shut();
  const std::lock_guard lock(close_mutex_);  // a second caller returns when the first has joined
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

std::string LanePeer::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void LanePeer::require_alive() const {
  if (const std::string why = lost(); !why.empty()) throw Error(Fault::peer_lost, "the peer was lost: " + why);
}

void LanePeer::emit(EventKind kind, std::uint64_t tag, Nanoseconds at) {
  if (events_.push({tag, kind, id_, at})) return;
  flooded_ = true;
  fail("events pile up: the application does not poll them");
}

void LanePeer::emit_local(std::uint64_t tag) { events_.push({tag, EventKind::local, id_, now_ns()}); }

void LanePeer::emit_error(std::uint64_t tag) { events_.push_last({tag, EventKind::error, id_, now_ns()}); }

void LanePeer::set_lost(std::string_view why) noexcept {
  try {
    lost_ = why;
  } catch (const std::bad_alloc&) {
    lost_ = "no memory";  // fits into the string itself
  }
}

void LanePeer::set_cause(std::string_view why) noexcept {
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) set_lost(why);
}

void LanePeer::fail(std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    if (lost_.empty()) set_lost(why);
    end_open_transfers();
  }
  changed_.notify_all();
  let_go(Parting::lost);
  for (const Socket& lane : lanes_) lane.shut();
  events_.push_last({0, EventKind::peer_lost, id_, now_ns()});
}

LanePlan* LanePeer::plan(std::uint32_t id) { return id < plans_.size() ? plans_[id].get() : nullptr; }

void LanePeer::send(const Notice& notice, const void* payload, int descriptor) {
  Notice head = notice;
  iovec vectors[2] = {{&head, sizeof head}, {const_cast<void*>(payload), payload ? notice.payload_bytes : 0}};
  int code = 0;
  {
    const std::lock_guard lock(send_mutex_);
    code = send_vectors(lanes_[0].fd(), vectors, 2, descriptor);
  }
  if (code != 0) fail(closed_or(code));
}

void LanePeer::arm(const LanePlan& plan, Op op, std::uint64_t tag) {
  require_alive();
  Notice notice;
  notice.kind = NoticeKind::arm;
  notice.plan = plan.id();
  notice.op = op;
  notice.tag = tag;
  send(notice);
}

void LanePeer::release(std::uint64_t tag) {
  require_alive();
  Notice notice;
  notice.kind = NoticeKind::release;
  notice.tag = tag;
  send(notice);
}

// --- keys and plans --------------------------------------------------------------------------------------------------

std::string write_keys(std::span<const RegionKey> keys) {
  std::string text(reinterpret_cast<const char*>(&keys_magic), sizeof keys_magic);
  return text.append(reinterpret_cast<const char*>(keys.data()), keys.size_bytes());
}

std::vector<RegionKey> read_keys(const std::string& keys) {
  std::uint32_t magic = 0;
  if (keys.size() >= sizeof magic) std::memcpy(&magic, keys.data(), sizeof magic);
  if (magic != keys_magic || (keys.size() - sizeof magic) % sizeof(RegionKey) != 0)
    throw Error(Fault::usage, "the peer's keys are malformed");
  std::vector<RegionKey> found((keys.size() - sizeof magic) / sizeof(RegionKey));
  if (!found.empty()) std::memcpy(found.data(), keys.data() + sizeof magic, found.size() * sizeof(RegionKey));
  return found;
}

void LanePeer::import_keys(const std::string& keys) { learn(read_keys(keys)); }

void LanePeer::learn(std::span<const RegionKey> keys) {
  remote_regions_.clear();
  for (const RegionKey& key : keys) remote_regions_[key.id] = {key};
}

std::byte* LanePeer::locate_once(RemoteRegion& region, Deadline deadline) {
  if (!region.located) region.address = locate(region.key, deadline);
  region.located = true;
  return region.address;
}

namespace {

void require_inside(const char* side, std::size_t i, std::uint64_t offset, std::uint64_t length, std::uint64_t bytes) {
  if (length <= bytes && offset <= bytes - length) return;
  throw Error(Fault::usage, std::string("descriptor ") + std::to_string(i) + " lies outside its " + side +
                                " region: " + std::to_string(offset) + " + " + std::to_string(length) + " > " +
                                std::to_string(bytes));
}

void require_shape(const PlanArrays& arrays) {
  const std::size_t n = arrays.lengths.size();
  if (arrays.local_regions.size() != n || arrays.local_offsets.size() != n || arrays.remote_regions.size() != n ||
      arrays.remote_offsets.size() != n)
    throw Error(Fault::usage, "the arrays of a plan differ in length");
  if (n > max_descriptors)
    throw Error(Fault::usage,
                std::to_string(n) + " descriptors; a plan takes at most " + std::to_string(max_descriptors));
  const auto starts = arrays.segment_starts;
  bool sorted = starts.size() <= max_segments && (starts.empty() || starts[0] == 0);
  for (std::size_t i = 1; i < starts.size(); ++i) sorted = sorted && starts[i] > starts[i - 1];
  if (!sorted || (!starts.empty() && starts.back() >= n && starts.back() > 0))
    throw Error(Fault::usage, "segment starts must ascend from 0 and lie inside the plan");
}

}  // namespace

std::shared_ptr<LanePlan> LanePeer::prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                            Deadline deadline) {
  require_alive();
  require_shape(arrays);
  const std::size_t n = arrays.lengths.size();
  std::vector<iovec> pieces(n);
  std::vector<std::byte*> there;
  std::vector<WireDescriptor> mine(n);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (arrays.local_regions[i] >= regions.size())
      throw Error(Fault::usage, "descriptor " + std::to_string(i) + " names an unregistered local region");
    const Region& region = regions[arrays.local_regions[i]];
    require_inside("local", i, arrays.local_offsets[i], arrays.lengths[i], region.bytes);
    const auto remote = remote_regions_.find(arrays.remote_regions[i]);
    if (remote == remote_regions_.end())
      throw Error(Fault::usage,
                  "descriptor " + std::to_string(i) + " names a remote region whose key was not imported");
    require_inside("remote", i, arrays.remote_offsets[i], arrays.lengths[i], remote->second.key.bytes);
    if (std::byte* const address = locate_once(remote->second, deadline)) {
      there.resize(n);
      there[i] = address + arrays.remote_offsets[i];
    }
    if (arrays.lengths[i] > UINT64_MAX - total) throw Error(Fault::usage, "a plan of more than 64 bits of bytes");
    total += arrays.lengths[i];
    pieces[i] = {region.address + arrays.local_offsets[i], arrays.lengths[i]};
    mine[i] = {arrays.local_regions[i], 0, arrays.local_offsets[i], arrays.lengths[i]};
  }

  std::shared_ptr<LanePlan> made;
  {
    const std::lock_guard lock(mutex_);
    made = std::make_shared<LanePlan>(*this, static_cast<std::uint32_t>(plans_.size()), std::move(pieces),
                                      std::move(there), arrays.segment_starts);
    plans_.push_back(made);  // before the peer hears of it: it may post at once
  }
  Notice notice;
  notice.kind = NoticeKind::prepare;
  notice.plan = made->id();
  notice.count = n;
  notice.payload_bytes = n * sizeof(WireDescriptor);
  LanePeer::send(notice, mine.data());  // lane 0 has room for all of it

  std::vector<WireDescriptor> theirs;
  {
    std::unique_lock lock(mutex_);
    const auto arrived = [&] { return stopping_ || prepared_by_peer_.contains(made->id()); };
    if (!changed_.wait_until(lock, deadline.time_point(), arrived))
      throw Error(Fault::peer_lost, "the peer did not prepare its side of the plan in time");
    const auto found = prepared_by_peer_.find(made->id());
    if (found == prepared_by_peer_.end()) throw Error(Fault::peer_lost, "the peer was lost: " + lost_);
    theirs = std::move(found->second);
    prepared_by_peer_.erase(found);
    prepared_early_ -= theirs.size();
  }
  compare_prepared(made->id(), arrays, theirs);
  return made;
}

void LanePeer::compare_prepared(std::uint32_t id, const PlanArrays& arrays,
                                const std::vector<WireDescriptor>& theirs) const {
  const auto differ = [id](const std::string& how) {
    return Error(Fault::usage, "the two sides prepared different plans (number " + std::to_string(id) + "): " + how);
  };
  if (theirs.size() != arrays.lengths.size())
    throw differ(std::to_string(arrays.lengths.size()) + " descriptors here, " + std::to_string(theirs.size()) +
                 " there");
  for (std::size_t i = 0; i < theirs.size(); ++i)
    if (theirs[i].region != arrays.remote_regions[i] || theirs[i].offset != arrays.remote_offsets[i] ||
        theirs[i].length != arrays.lengths[i])
      throw differ("descriptor " + std::to_string(i));
}

// --- notices ---------------------------------------------------------------------------------------------------------

void LanePeer::read_notices() {
  std::string wrong;
  while (wrong.empty() && !flooded_) {  // what the socket still holds would go on to fill the queue
    Notice notice;
    const int code = receive_with_descriptor(lanes_[0].fd(), &notice, sizeof notice, attached_);
    wrong = code != 0 ? closed_or(code) : receive_notice(notice);
  }
  if (!wrong.empty()) fail(wrong);
  {
    const std::lock_guard lock(mutex_);
    notices_over_ = true;
  }
  changed_.notify_all();
}

// Returns why the peer must be given up, or nothing.
std::string LanePeer::receive_notice(const Notice& notice) {
  if (notice.magic != notice_magic) return "protocol error: no notice where one belongs";
  if (notice.op != Op::push && notice.op != Op::pull) return "protocol error: unknown operation";
  if (notice.kind == NoticeKind::prepare) return receive_prepare(notice);

  segments_.clear();
  if (notice.payload_bytes != 0) {
    if (notice.kind != NoticeKind::request || notice.payload_bytes % 4 != 0 || notice.payload_bytes > 4 * max_segments)
      return "protocol error: a payload where none belongs";
    segments_.resize(notice.payload_bytes / 4);
    if (const int code = receive_all(lanes_[0].fd(), segments_.data(), notice.payload_bytes)) return closed_or(code);
  }
  return take(notice, segments_);
}

std::string LanePeer::take(const Notice& notice, std::span<const std::uint32_t> segments) {
  switch (notice.kind) {
    case NoticeKind::arm:
      emit(EventKind::armed, notice.tag);
      return {};
    case NoticeKind::release:
      emit(EventKind::released, notice.tag);
      return {};
    case NoticeKind::bye:
      return "the peer closed the connection";
    default:
      return handle(notice, segments);
  }
}

std::string LanePeer::receive_prepare(const Notice& notice) {
  if (notice.count > max_descriptors || notice.payload_bytes != notice.count * sizeof(WireDescriptor))
    return "protocol error: a plan of impossible size";
  if (notice.plan != next_of_peer_++) return "protocol error: a plan out of order";
  {
    const std::lock_guard lock(mutex_);
    if (prepared_by_peer_.size() >= max_early_prepares || notice.count > max_descriptors - prepared_early_)
      return "protocol error: too many plans prepared ahead";
    prepared_early_ += notice.count;
  }
  // Memory only for what has come, not for what is announced.
  std::vector<WireDescriptor> theirs;
  while (theirs.size() < notice.count) {
    const std::size_t before = theirs.size();
    theirs.resize(std::min<std::size_t>(notice.count, before + descriptors_per_read));
    const std::uint64_t bytes = (theirs.size() - before) * sizeof(WireDescriptor);
    if (const int code = receive_all(lanes_[0].fd(), theirs.data() + before, bytes)) return closed_or(code);
  }
  {
    const std::lock_guard lock(mutex_);
    prepared_by_peer_.emplace(notice.plan, std::move(theirs));
  }
  changed_.notify_all();
  return {};
}

}  // namespace kvxfer
