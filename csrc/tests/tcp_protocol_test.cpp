// What a peer that knows the token but breaks the protocol is told to have done; every time it is given up, and nothing
// else.
#include "backends/tcp/peer.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 1 << 16;

// A context, and bare lanes at the other end of its one peer, with one plan of two segments prepared.
struct Bare {
  End end;
  LaneListener listener{"127.0.0.1", 0, token};
  std::vector<Socket> lanes;
  std::shared_ptr<Plan> plan;
  ReadyFlag never{0};

  Bare() {
    end.context = find_backend("tcp").open(token, {});
    end.allocate(bytes);
    together([&] { end.peer = end.context->connect(listener.endpoint(), soon()); },
             [&] { lanes = listener.accept(soon()); });
    end.peer->import_keys(end.context->export_keys({&end.region, 1}));
    PlanPieces pieces;
    pieces.segments = {0, 1};
    for (const std::uint64_t at : {std::uint64_t{0}, bytes / 2}) pieces.add(at, at, bytes / 2);
    WireDescriptor mine[2] = {{0, 0, 0, bytes / 2}, {0, 0, bytes / 2, bytes / 2}};
    Notice notice = make(NoticeKind::prepare, 0, 2);
    notice.payload_bytes = sizeof mine;
    say(0, notice);
    say(0, mine);
    plan = end.prepare(pieces);
  }
  template <typename T>
  void say(std::size_t lane, const T& what) const {
    CHECK_EQ(send_all(lanes[lane].fd(), &what, sizeof what), 0);
  }
  static Notice make(NoticeKind kind, std::uint64_t tag, std::uint64_t count = 0, std::uint64_t total = 0) {
    Notice notice;
    notice.kind = kind;
    notice.tag = tag;
    notice.count = count;
    notice.total = total;
    return notice;
  }
  static tcp::ChunkHeader chunk(std::uint64_t tag, std::uint64_t from, std::uint64_t length, std::uint64_t total) {
    tcp::ChunkHeader header;
    header.tag = tag;
    header.from = from;
    header.bytes = length;
    header.total = total;
    return header;
  }
  void check_lost(const std::string& why) {
    end.wait(EventKind::peer_lost, 0);
    if (end.peer->lost() != "protocol error: " + why)
      throw Failure("lost for '" + end.peer->lost() + "', not '" + why + "'");
  }
};

TEST(tcp_protocol, answers_to_what_was_not_asked) {
  for (const NoticeKind kind : {NoticeKind::confirm, NoticeKind::cancel_seen}) {
    Bare bare;
    bare.end.context->post(*bare.plan, Op::push, {}, 3, &bare.never);
    bare.say(0, Bare::make(kind, 3));
    bare.check_lost(kind == NoticeKind::confirm ? "bytes confirmed that were not sent"
                                                : "a cancel that nobody asked for");
  }
  Bare bare;
  Notice request = Bare::make(NoticeKind::request, 1);
  request.op = Op::pull;
  bare.say(0, request);
  bare.say(0, request);
  bare.check_lost("a pull under a tag that is open");
}

TEST(tcp_protocol, notices_that_make_no_sense) {
  const auto lost = [](Notice notice, const std::string& why) {
    Bare bare;
    bare.say(0, notice);
    bare.check_lost(why);
  };
  Notice wrong = Bare::make(NoticeKind::arm, 1);
  wrong.magic = 1;
  lost(wrong, "no notice where one belongs");
  wrong = Bare::make(NoticeKind::arm, 1);
  wrong.op = static_cast<Op>(7);
  lost(wrong, "unknown operation");
  wrong = Bare::make(NoticeKind::arm, 1);
  wrong.payload_bytes = 4;
  lost(wrong, "a payload where none belongs");
  lost(Bare::make(static_cast<NoticeKind>(99), 1), "unknown notice");
  wrong = Bare::make(NoticeKind::request, 1);
  wrong.payload_bytes = std::uint64_t{1} << 40;
  lost(wrong, "a payload where none belongs");
  wrong = Bare::make(NoticeKind::request, 1);
  lost(wrong, "a request that is no pull");
  wrong.op = Op::pull;
  wrong.plan = 1;
  lost(wrong, "a pull of an unknown plan");
  lost(Bare::make(NoticeKind::cancelled, 1, 5, bytes + 1), "a cancelled transfer of an unknown plan");
  lost(Bare::make(NoticeKind::cancelled, 1, 5, 4), "a cancelled transfer of an unknown plan");
  wrong = Bare::make(NoticeKind::cancelled, 1, 0, 4);
  wrong.op = Op::pull;
  lost(wrong, "a cancelled transfer that is not open");

  Notice plan = Bare::make(NoticeKind::prepare, 0, 1);
  plan.payload_bytes = sizeof(WireDescriptor);
  lost(plan, "a plan out of order");
  plan.plan = 1;
  plan.count = max_descriptors + 1;
  plan.payload_bytes = plan.count * sizeof(WireDescriptor);
  lost(plan, "a plan of impossible size");
  plan.count = (std::uint64_t{1} << 61) + 1;  // the product overflows to the size of three descriptors
  plan.payload_bytes = plan.count * sizeof(WireDescriptor);
  lost(plan, "a plan of impossible size");
}

TEST(tcp_protocol, a_pull_of_unknown_or_too_many_segments) {
  for (const std::vector<std::uint32_t>& segments : std::vector<std::vector<std::uint32_t>>{{2}, {0, 1, 0}}) {
    Bare bare;
    Notice request = Bare::make(NoticeKind::request, 1);
    request.op = Op::pull;
    request.payload_bytes = 4 * segments.size();
    bare.say(0, request);
    for (const std::uint32_t segment : segments) bare.say(0, segment);
    bare.check_lost("a pull of an unknown segment");
  }
}

TEST(tcp_protocol, chunks_that_make_no_sense) {
  const auto lost = [](const tcp::ChunkHeader& header, const std::string& why) {
    Bare bare;
    bare.say(1, header);
    bare.check_lost(why);
  };
  tcp::ChunkHeader wrong = Bare::chunk(1, 0, 8, bytes);
  wrong.magic = 1;
  lost(wrong, "no chunk header where one belongs");
  wrong = Bare::chunk(1, 0, 8, bytes);
  wrong.plan = 1;
  lost(wrong, "a chunk of an unknown plan");
  wrong = Bare::chunk(1, 0, 8, bytes);
  wrong.op = Op::pull;
  lost(wrong, "a chunk that nobody asked for");
  lost(Bare::chunk(1, bytes, 1, bytes), "a chunk outside its plan");
  lost(Bare::chunk(1, UINT64_MAX, 2, bytes), "a chunk outside its plan");
  lost(Bare::chunk(1, 8, UINT64_MAX, bytes), "a chunk outside its plan");
  lost(Bare::chunk(1, 0, 8, bytes + 1), "a chunk outside its plan");
  lost(Bare::chunk(1, 0, 9, 8), "a chunk outside its plan");
  lost(Bare::chunk(1, 0, 0, 8), "an empty chunk");
}

TEST(tcp_protocol, chunks_that_do_not_fit_their_transfer) {
  const char payload[8] = {};
  for (const tcp::ChunkHeader& second : {Bare::chunk(1, 8, 8, 17), Bare::chunk(1, 8, 9, 16)}) {
    Bare bare;
    bare.say(1, Bare::chunk(1, 0, 8, 16));
    bare.say(1, payload);
    bare.say(1, second);
    bare.check_lost("a chunk that does not belong to its transfer");
  }
  // More after the sender said where it stopped.
  Bare bare;
  bare.say(0, Bare::make(NoticeKind::cancelled, 1, 8, 24));
  bare.say(0, Bare::make(NoticeKind::arm, 2));
  bare.end.wait(EventKind::armed, 2);  // so it has read what was said before, on this lane
  std::uint64_t got = 0;
  bare.say(1, Bare::chunk(1, 0, 4, 24));
  bare.say(1, std::uint32_t{0});
  while (got == 0) got = bare.end.context->bytes_moved();
  bare.say(1, Bare::chunk(1, 4, 8, 24));
  bare.check_lost("a chunk that does not belong to its transfer");
}

TEST(tcp_protocol, a_flood_of_plans_is_cut_off) {
  Bare bare;
  Notice plan = Bare::make(NoticeKind::prepare, 0, 0);
  for (std::uint32_t i = 1; i <= 1025; ++i) {
    plan.plan = i;
    if (send_all(bare.lanes[0].fd(), &plan, sizeof plan) != 0) break;
  }
  bare.check_lost("too many plans prepared ahead");
}

}  // namespace
}  // namespace kvxfer::test
