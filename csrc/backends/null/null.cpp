#include "backends/null/null.h"

#include <algorithm>
#include <vector>

#include "backend/lane_context.h"

namespace kvxfer::null {

namespace {

class NullPeer final : public LanePeer {
 public:
  using LanePeer::LanePeer;
  ~NullPeer() override { close(); }  // its threads use what is destroyed next

  void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag*) override {
    require_alive();
    Notice notice;
    notice.kind = NoticeKind::request;
    notice.plan = plan.id();
    notice.op = op;
    notice.tag = tag;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) throw Error(Fault::peer_lost, "the peer was lost");
      plan.ranges(segments, ranges_);  // refuses what a backend that moves bytes would refuse
      if (open_.size() == max_inflight) throw Error(Fault::unavailable, "too many open transfers");
      if (std::find(open_.begin(), open_.end(), tag) != open_.end())
        throw Error(Fault::usage, "tag " + std::to_string(tag) + " is open already");
      open_.push_back(tag);
    }
    send(notice);
  }

  bool cancel(std::uint64_t tag) override {  // always too late: the request is on its way
    const std::lock_guard lock(mutex_);
    return std::find(open_.begin(), open_.end(), tag) != open_.end();
  }

  std::vector<std::string> describe() const override { return {"none"}; }

 protected:
  std::string handle(const Notice& notice, std::span<const std::uint32_t>) override {
    if (notice.kind == NoticeKind::request) {
      Notice answer = notice;
      answer.kind = NoticeKind::confirm;
      answer.payload_bytes = 0;
      send(answer);
      emit(EventKind::delivered, notice.tag);
      return {};
    }
    if (notice.kind != NoticeKind::confirm) return "protocol error: unknown notice";
    {
      const std::lock_guard lock(mutex_);
      if (std::erase(open_, notice.tag) == 0) return "protocol error: confirmation of a transfer that is not open";
    }
    emit(EventKind::confirmed, notice.tag);
    return {};
  }

  void end_open_transfers() override {
    for (const std::uint64_t tag : open_) emit_error(tag);
    open_.clear();
  }

 private:
  std::vector<std::uint64_t> open_ = [] {  // posted here; under mutex_
    std::vector<std::uint64_t> room;
    room.reserve(max_inflight);
    return room;
  }();
  std::vector<Range> ranges_;  // under mutex_; a member so that posting does not allocate
};

Capabilities abilities() {
  Capabilities c;
  c.moves_data = false;
  c.max_inflight = max_inflight;
  return c;
}

class NullContext final : public LaneContext {
 public:
  explicit NullContext(const Token& token) : LaneContext(abilities(), token, 1) {}

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() != 1) throw Error(Fault::usage, "the peer opened data connections: it does not run backend null");
    return std::make_shared<NullPeer>(events, id, std::move(lanes));
  }
};

}  // namespace

Probe probe() {
  Probe found;
  found.available = true;
  found.library_path = "built in";
  found.transports = "none";
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  refuse_unknown(options, {});
  return std::make_unique<NullContext>(token);
}

}  // namespace kvxfer::null
