// What is particular to shm: pools that another process can map, and descriptors of them that cannot be trusted.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "tests/bare_copy.h"

namespace kvxfer::test {
namespace {

Socket memfd(std::uint64_t bytes, int seals, unsigned flags = MFD_ALLOW_SEALING) {
  Socket made(::memfd_create("test", MFD_CLOEXEC | flags));
  CHECK_EQ(::ftruncate(made.fd(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) CHECK_EQ(::fcntl(made.fd(), F_ADD_SEALS, seals), 0);
  return made;
}

TEST(shm, registers_its_own_memory_and_no_other) {
  const auto context = find_backend("shm").open(token, {});
  CHECK(context->capabilities().own_memory && context->capabilities().one_sided && !context->capabilities().needs_arm);
  const Region whole = context->allocate(10'000, MemoryKind::host, -1);
  const Region part = context->register_memory(whole.address + 1, 9'999, MemoryKind::host);
  CHECK_EQ(part.id, 1U);
  std::array<std::byte, 64> other{};
  CHECK_THROWS(Fault::usage, "only memory that its own context allocated",
               context->register_memory(other.data(), other.size(), MemoryKind::host));
  CHECK_THROWS(Fault::usage, "only memory", context->register_memory(whole.address + 1, 10'000, MemoryKind::host));
  CHECK_THROWS(Fault::usage, "only memory", context->register_memory(whole.address - 1, 2, MemoryKind::host));
}

TEST(shm, a_region_inside_a_later_pool_is_found_by_the_other_side) {
  Pair pair(4096, {}, "shm");
  for (End* side : {&pair.a, &pair.b}) {
    side->context->allocate(5000, MemoryKind::host, -1);
    const Region pool = side->context->allocate(20'000, MemoryKind::host, -1);
    side->region = side->context->register_memory(pool.address + 7000, 13'000, MemoryKind::host);
  }
  pair.a.peer->import_keys(pair.b.context->export_keys({&pair.b.region, 1}));
  pair.b.peer->import_keys(pair.a.context->export_keys({&pair.a.region, 1}));
  std::memset(pair.a.region.address, 0x3C, 13'000);
  const std::vector<std::uint32_t> region{pair.a.region.id}, start{0};
  const std::vector<std::uint64_t> offset{11}, length{12'989};
  std::shared_ptr<Plan> push, target;
  together(
      [&] { push = pair.a.context->prepare(*pair.a.peer, {region, offset, region, offset, length, start}, soon()); },
      [&] { target = pair.b.context->prepare(*pair.b.peer, {region, offset, region, offset, length, start}, soon()); });
  pair.a.context->post(*push, Op::push, {}, 1, nullptr);
  pair.a.wait(EventKind::confirmed, 1);
  const std::byte* there = pair.b.region.address;
  CHECK(there[10] == std::byte{0} && there[11] == std::byte{0x3C} && there[12'999] == std::byte{0x3C});
  CHECK_EQ(pair.a.peer->describe().front(), "shm/memfd");
}

PlanPieces one_piece(std::uint64_t bytes) {
  PlanPieces pieces;
  pieces.add(0, 0, bytes);
  return pieces;
}

// What prepare says when the peer shows this memory.
void require_refused(BareCopy& bare, int descriptor, std::uint64_t announced, Fault fault, const std::string& why) {
  together([&] { bare.show_pool_when_asked(descriptor, announced); },
           [&] { CHECK_THROWS(fault, why, bare.end.prepare(one_piece(8))); });
}

TEST(shm, memory_that_cannot_be_trusted_loses_the_peer) {
  constexpr std::uint64_t bytes = 1 << 16;
  const auto lost = [](int descriptor, const std::string& why) {
    BareCopy bare("shm");
    const std::string said = "protocol error: memory that cannot be trusted: " + why;
    require_refused(bare, descriptor, bytes, Fault::peer_lost, said);
    bare.check_lost(said);
  };
  lost(memfd(bytes, 0).fd(), "it is not sealed against becoming shorter");
  lost(memfd(bytes, F_SEAL_GROW).fd(), "it is not sealed against becoming shorter");
  lost(memfd(bytes, 0, 0).fd(), "it is not sealed against becoming shorter");
  lost(memfd(bytes - 1, F_SEAL_SHRINK).fd(), "it is shorter than announced");
  lost(memfd(0, F_SEAL_SHRINK).fd(), "it is shorter than announced");
  lost(memfd(bytes, F_SEAL_SHRINK | F_SEAL_WRITE).fd(), "it is sealed against being written");
  lost(memfd(bytes, F_SEAL_SHRINK).fd(), "it has holes");
  const Socket part = memfd(4 * bytes, F_SEAL_SHRINK);  // as much as is announced, but in another place
  CHECK_EQ(::fallocate(part.fd(), 0, bytes, bytes), 0);
  lost(part.fd(), "it has holes");
  const Mapping punched(bytes, Backing::shared);
  CHECK_EQ(::fallocate(punched.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, bytes / 2, 4096), 0);
  lost(punched.descriptor(), "it has holes");
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const Socket reader(ends[0]), writer(ends[1]);
  lost(reader.fd(), "it is no shared memory");
  lost(Socket(::open("/dev/zero", O_RDWR)).fd(), "it is no shared memory");
  lost(Socket(::open("/proc/self/exe", O_RDONLY)).fd(), "it is no");
}

TEST(shm, memory_that_may_not_be_written_is_an_error_of_prepare) {
  BareCopy bare("shm");
  const std::string path = "/proc/self/fd/" + std::to_string(bare.theirs.descriptor());
  require_refused(bare, Socket(::open(path.c_str(), O_RDONLY)).fd(), bare.theirs.bytes(), Fault::unavailable,
                  "the peer's memory cannot be used: cannot map");
}

TEST(shm, memory_out_of_turn_loses_the_peer) {
  {
    BareCopy bare("shm");  // unasked
    bare.show_pool(bare.theirs.descriptor(), bare.theirs.bytes());
    bare.check_lost("protocol error: memory that nobody asked for");
  }
  {
    BareCopy bare("shm");  // twice
    bare.prepare();
    bare.show_pool(bare.theirs.descriptor(), bare.theirs.bytes());
    bare.check_lost("protocol error: memory that nobody asked for");
  }
  BareCopy other("shm");  // not the one asked for
  together(
      [&] {
        other.await_question();
        say(other.lanes[0], make_notice(NoticeKind::pool, Op::push, 0, std::uint64_t{1} << 40, 1));
      },
      [&] { CHECK_THROWS(Fault::peer_lost, "memory that nobody asked for", other.end.prepare(one_piece(8))); });
  for (const std::uint64_t number : {std::uint64_t{1}, std::uint64_t{1} << 32}) {
    BareCopy asks("shm");
    say(asks.lanes[0], make_notice(NoticeKind::pool_wanted, Op::push, 0, number));
    asks.check_lost("protocol error: it asks for memory that is not there");
  }
}

TEST(shm, a_peer_that_shows_nothing_is_waited_for_until_the_deadline) {
  BareCopy bare("shm");
  for (int i = 0; i < 2; ++i)  // asked once
    CHECK_THROWS(Fault::peer_lost, "did not show its memory in time",
                 bare.end.prepare_with(*bare.end.peer, one_piece(8), Deadline::after(20'000'000)));
  require_refused(bare, -1, 1 << 16, Fault::unavailable, "no descriptor came with it");
  bare.prepare();  // asks again
}

TEST(shm, many_pools_on_both_sides_at_once) {
  constexpr std::uint32_t pools = 600;
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit enough{std::min<rlim_t>(before.rlim_max, std::max<rlim_t>(before.rlim_cur, 4 * pools)), before.rlim_max};
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &enough), 0);
  {
    End a, b;
    for (End* side : {&a, &b}) {
      side->context = find_backend("shm").open(token, {});
      for (std::uint32_t i = 0; i < pools; ++i) side->allocate(4096);
    }
    join(*a.context, a.peer, *b.context, b.peer);
    together([&] { a.peer->import_keys(b.context->export_keys(b.regions)); },
             [&] { b.peer->import_keys(a.context->export_keys(a.regions)); });
    PlanPieces pieces;
    for (std::uint32_t i = 0; i < pools; ++i) pieces.add(0, 0, 4096, i, pools - 1 - i);
    std::shared_ptr<Plan> push, target;
    together([&] { push = a.prepare(pieces); }, [&] { target = b.prepare(pieces.mirrored()); });
    for (std::uint32_t i = 0; i < pools; ++i) std::memset(a.at(0, i), static_cast<int>(i % 251) + 1, 4096);
    a.context->post(*push, Op::push, {}, 1, nullptr);
    a.wait(EventKind::confirmed, 1);
    for (std::uint32_t i = 0; i < pools; ++i) CHECK(std::memcmp(a.at(0, i), b.at(0, pools - 1 - i), 4096) == 0);
  }
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(shm, keys_beyond_the_pool_are_refused) {
  for (const auto& [place, bytes] :
       {std::pair<std::uint64_t, std::uint64_t>{1, 1 << 16}, {UINT64_MAX, 2}, {0, 65'537}}) {
    BareCopy bare("shm");
    bare.import(place, bytes);
    const auto& pool = bare.theirs;
    together([&] { bare.show_pool_when_asked(pool.descriptor(), pool.bytes()); },
             [&] { CHECK_THROWS(Fault::usage, "beyond its pool", bare.end.prepare(one_piece(1))); });
  }
}

TEST(shm, no_descriptor_left_is_said_and_can_be_mended) {
  Pair pair(1 << 16, {}, "shm");
  End fresh;  // a second peer, whose pool is not mapped yet
  fresh.context = find_backend("shm").open(token, {});
  fresh.region = fresh.context->allocate(1 << 16, MemoryKind::host, -1);
  std::shared_ptr<Peer> there;
  join(*pair.a.context, pair.a.peer, *fresh.context, there);
  PlanPieces pieces;
  pieces.add(0, 0, 1 << 16);

  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int unused = ::dup(0);
  ::close(unused);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(unused);
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  std::string said;
  try {
    pair.a.peer->import_keys(fresh.context->export_keys({&fresh.region, 1}));
    pair.a.prepare(pieces);
  } catch (const Error& error) {
    said = error.what();
  }
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  if (said.find("too many files open (raise ulimit -n)") == std::string::npos) throw Failure("said '" + said + "'");

  pair.a.peer->import_keys(fresh.context->export_keys({&fresh.region, 1}));
  there->import_keys(pair.a.context->export_keys({&pair.a.region, 1}));
  std::shared_ptr<Plan> mine;
  together([&] { mine = pair.a.prepare(pieces); }, [&] { fresh.prepare_with(*there, pieces.mirrored()); });
  pair.a.context->post(*mine, Op::push, {}, 1, nullptr);
  pair.a.wait(EventKind::confirmed, 1);
  CHECK(std::memcmp(pair.a.region.address, fresh.region.address, 1 << 16) == 0);
}

TEST(shm, no_memory_is_an_error) {
  const auto context = find_backend("shm").open(token, {});
  CHECK_THROWS(Fault::unavailable, "no memory", context->allocate(std::uint64_t{1} << 50, MemoryKind::host, -1));
  CHECK_THROWS(Fault::unavailable, "NUMA node 999", context->allocate(4096, MemoryKind::host, 999));
}

}  // namespace
}  // namespace kvxfer::test
