// A context of a backend whose initiator does the copying, and a bare lane at the other end of its one peer: what a
// proper or a hostile peer says goes over it by hand.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "backend/lane_peer.h"
#include "memory/mapping.h"
#include "tests/pair.h"

namespace kvxfer::test {

inline const std::vector<std::string> copying_backends{"shm", "cma"};

inline Notice make_notice(NoticeKind kind, Op op, std::uint64_t tag, std::uint64_t count = 0, std::uint64_t total = 0) {
  Notice notice;
  notice.kind = kind;
  notice.op = op;
  notice.tag = tag;
  notice.count = count;
  notice.total = total;
  return notice;
}

inline void say(const Socket& lane, const Notice& notice, const void* payload = nullptr, int descriptor = -1) {
  Notice head = notice;
  iovec vectors[2] = {{&head, sizeof head}, {const_cast<void*>(payload), notice.payload_bytes}};
  CHECK_EQ(send_vectors(lane.fd(), vectors, payload != nullptr ? 2 : 1, descriptor), 0);
}

struct BareCopy {
  End end;
  LaneListener listener{token};
  std::vector<Socket> lanes;
  Mapping theirs;  // the memory that stands for the peer's
  std::shared_ptr<Plan> plan;
  ReadyFlag never{0};

  // Connected, with keys of `region_bytes` in the peer's pool 0 imported.
  explicit BareCopy(const std::string& backend, std::uint64_t region_bytes = 1 << 16, const Options& options = {})
      : theirs(region_bytes, Backing::shared) {
    end.context = find_backend(backend).open(token, options);
    end.region = end.context->allocate(region_bytes, MemoryKind::host, -1);
    together([&] { end.peer = end.context->connect(listener.endpoint(), soon()); },
             [&] { lanes = listener.accept(soon()); });
    const timeval most{patience / second, 0};  // that hear() waits
    CHECK_EQ(::setsockopt(lanes[0].fd(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most), 0);
    import(backend == "cma" ? reinterpret_cast<std::uintptr_t>(theirs.address()) : 0, region_bytes);
  }
  void import(std::uint64_t place, std::uint64_t region_bytes) {
    const RegionKey key{0, 0, region_bytes, place};
    end.peer->import_keys(write_keys({&key, 1}));
  }
  Notice hear() {
    Notice notice;
    CHECK_EQ(receive_all(lanes[0].fd(), &notice, sizeof notice), 0);
    return notice;
  }
  void show_pool(int descriptor, std::uint64_t announced) {
    say(lanes[0], make_notice(NoticeKind::pool, Op::push, 0, 0, announced), nullptr, descriptor);
  }
  void await_question() {
    const Notice question = hear();
    CHECK(question.kind == NoticeKind::pool_wanted && question.count == 0);
  }
  // While this side prepares.
  void show_pool_when_asked(int descriptor, std::uint64_t announced) {
    await_question();
    show_pool(descriptor, announced);
  }
  // As a proper peer does it, for the first time; the plan is `pieces`, or all of the region in one piece.
  void prepare(const PlanPieces& pieces) {
    std::vector<WireDescriptor> mine;
    for (std::size_t i = 0; i < pieces.lengths.size(); ++i) mine.push_back({0, 0, pieces.remote[i], pieces.lengths[i]});
    Notice notice = make_notice(NoticeKind::prepare, Op::push, 0, mine.size());
    notice.payload_bytes = mine.size() * sizeof(WireDescriptor);
    together(
        [&] {
          say(lanes[0], notice, mine.data());
          if (end.context->capabilities().own_memory) show_pool_when_asked(theirs.descriptor(), theirs.bytes());
        },
        [&] {
          plan = end.prepare(pieces);  // and reads this side's own
        });
  }
  void prepare() {
    PlanPieces pieces;
    pieces.add(0, 0, end.region.bytes);
    prepare(pieces);
    const Notice theirs_of_us = hear();
    CHECK(theirs_of_us.kind == NoticeKind::prepare);
    std::vector<char> descriptors(theirs_of_us.payload_bytes);
    CHECK_EQ(receive_all(lanes[0].fd(), descriptors.data(), descriptors.size()), 0);
  }
  void check_lost(const std::string& why) {
    end.wait(EventKind::peer_lost, 0);
    if (end.peer->lost().find(why) == std::string::npos)
      throw Failure("lost for '" + end.peer->lost() + "', not '" + why + "'");
  }
};

}  // namespace kvxfer::test
