// Mistakes of the caller, or of the other side: Error(usage) that says what is wrong, and everything else goes on.
#include <atomic>
#include <memory>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = 1 << 16;

void require_well(const Subject& subject, Rig& rig) {
  const PlanPieces pieces = shuffled(16, 4096, 4);
  const Plans plans = rig.prepare(pieces);
  for (const Op op : subject.ops()) {
    rig.poison_target();
    rig.move(plans, op, 77);
    rig.require_moved(pieces);
  }
}

CHECK_BACKEND(misuse, plans_and_peers_of_another_context, all) {
  Rig rig(subject, {bytes});
  Rig other(subject, {bytes});
  const Plans plans = rig.prepare(one_piece(64));
  for (const Op op : subject.ops()) {
    CHECK_THROWS(Fault::usage, subject.can.needs_arm ? "" : "another context",
                 other.a.context->post(*plans.first, op, {}, 1, nullptr));
    CHECK_THROWS(Fault::usage, "another context", other.a.context->arm(*plans.first, op, {}, 1));
  }
  CHECK_THROWS(Fault::usage, "another context", other.a.context->release(*rig.a.peer, 1));
  CHECK_THROWS(Fault::usage, "another context", other.a.context->cancel(*rig.a.peer, 1));
  CHECK_THROWS(Fault::usage, "another context", other.a.prepare_with(*rig.a.peer, one_piece(64)));
  require_well(subject, rig);
  require_well(subject, other);
}

CHECK_BACKEND(misuse, operations_that_it_has_not, all) {
  Rig rig(subject, {bytes});
  const Plans plans = rig.prepare(one_piece(64));
  if (!subject.can.push)
    CHECK_THROWS(Fault::usage, "push", rig.a.context->post(*plans.first, Op::push, {}, 1, nullptr));
  if (!subject.can.pull)
    CHECK_THROWS(Fault::usage, "pull", rig.b.context->post(*plans.second, Op::pull, {}, 1, nullptr));
  require_well(subject, rig);
}

PlanPieces piece(std::uint64_t from, std::uint64_t to, std::uint64_t length, std::uint32_t from_region = 0,
                 std::uint32_t to_region = 0) {
  PlanPieces one;
  one.add(from, to, length, from_region, to_region);
  return one;
}

// Refused before the other side hears of it.
CHECK_BACKEND(misuse, descriptors_outside_what_is_registered, all) {
  Rig rig(subject, {bytes, 4096});
  const auto refused = [&](const char* part, const PlanPieces& pieces) {
    CHECK_THROWS(Fault::usage, part, rig.a.prepare(pieces));
    CHECK_THROWS(Fault::usage, part, rig.b.prepare(pieces));
  };
  for (const PlanPieces& outside :
       {piece(bytes, 0, 1), piece(bytes - 7, 0, 8), piece(0, 0, bytes + 1), piece(UINT64_MAX, 0, 2),
        piece(UINT64_MAX - 3, 0, 8), piece(1, 0, UINT64_MAX), piece(4096, 0, 1, 1), piece(bytes + 1, 0, 0)})
    refused("outside its local region", outside);
  for (const PlanPieces& outside : {piece(0, bytes, 1), piece(0, bytes - 7, 8), piece(0, UINT64_MAX, 2),
                                    piece(0, UINT64_MAX - 3, 8), piece(0, 4096, 1, 0, 1), piece(0, bytes + 1, 0)})
    refused("outside its remote region", outside);
  refused("region", piece(0, 0, 8, 2, 0));
  refused("region", piece(0, 0, 8, UINT32_MAX, 0));
  refused("region", piece(0, 0, 8, 0, 2));
  refused("region", piece(0, 0, 8, 0, UINT32_MAX));
  PlanPieces second_is_wrong = piece(0, 0, 8);
  second_is_wrong.add(bytes, 0, 8);
  refused("descriptor 1", second_is_wrong);
  require_well(subject, rig);
}

CHECK_BACKEND(misuse, arrays_and_segments_that_make_no_plan, all) {
  Rig rig(subject, {bytes});
  const PlanPieces good = shuffled(4, 64, 2);
  for (const Segments& starts : {Segments{1}, {0, 0}, {0, 2, 1}, {0, 4}, {0, UINT32_MAX}}) {
    PlanPieces bad = good;
    bad.segments = starts;
    CHECK_THROWS(Fault::usage, "segment", rig.a.prepare(bad));
  }
  for (const auto shorten :
       {+[](PlanPieces& p) { p.local.pop_back(); }, +[](PlanPieces& p) { p.remote.pop_back(); },
        +[](PlanPieces& p) { p.lengths.pop_back(); }, +[](PlanPieces& p) { p.local_regions.pop_back(); },
        +[](PlanPieces& p) { p.remote_regions.pop_back(); }}) {
    PlanPieces bad = good;
    shorten(bad);
    CHECK_THROWS(Fault::usage, "length", rig.a.prepare(bad));
  }
  require_well(subject, rig);
}

CHECK_BACKEND(misuse, keys_that_no_context_exported, all) {
  Rig rig(subject, {bytes});
  const std::string good = rig.b.context->export_keys(rig.b.regions);
  const std::string cut = good.substr(0, good.size() - 1);
  for (const std::string& wrong : {std::string(), std::string("keys"), cut, good + "x", std::string(64, '\0'),
                                   std::string(64, '\xff'), std::string(10'000, 'a')})
    CHECK_THROWS(Fault::usage, "keys", rig.a.peer->import_keys(wrong));
  rig.a.peer->import_keys(good);
  require_well(subject, rig);
}

CHECK_BACKEND(misuse, a_plan_before_the_keys, all) {
  const auto listens = subject.open();
  const auto connects = subject.open();
  std::shared_ptr<Peer> there, here;
  join(*connects, here, *listens, there);
  connects->allocate(4096, MemoryKind::host, -1);
  CHECK_THROWS(Fault::usage, "key", connects->prepare(*here, one_piece(8).arrays(), soon()));
}

// At least the side whose idea of the other's descriptors is wrong is told; and nobody waits.
CHECK_BACKEND(misuse, plans_of_the_two_sides_that_differ, all) {
  const PlanPieces mine = shuffled(8, 512, 4);
  const auto differs = [&](const auto& change) {
    Rig rig(subject, {bytes, bytes});
    PlanPieces theirs = mine.mirrored();
    change(theirs);
    std::atomic<int> told{0};
    const auto prepare = [&](const End& side, const PlanPieces& pieces) {
      try {
        side.prepare_with(*side.peer, pieces);
      } catch (const Error& error) {
        if (error.fault() != Fault::usage || std::string(error.what()).find("different plans") == std::string::npos)
          throw;
        ++told;
      }
    };
    together([&] { prepare(rig.a, mine); }, [&] { prepare(rig.b, theirs); });
    if (told == 0) throw Failure("nobody was told that the plans differ");
    require_well(subject, rig);
  };
  differs([](PlanPieces& theirs) { theirs.lengths[3] -= 1; });
  differs([](PlanPieces& theirs) { std::swap(theirs.remote[0], theirs.remote[7]); });
  differs([](PlanPieces& theirs) { std::swap(theirs.local[0], theirs.local[7]); });
  differs([](PlanPieces& theirs) { theirs.local_regions[5] = 1; });
  differs([](PlanPieces& theirs) { theirs.add(0, 0, 8); });
  differs([](PlanPieces& theirs) { theirs = PlanPieces{}; });
}

CHECK_BACKEND(misuse, endpoints_that_are_none, all) {
  const auto context = subject.open();
  for (const char* endpoint : {"", "nowhere", ":", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x"})
    CHECK_THROWS(Fault::usage, "endpoint", context->connect(endpoint, soon()));
  CHECK_THROWS(Fault::usage, "listen", context->accept(soon()));
}

}  // namespace
}  // namespace kvxfer::test
