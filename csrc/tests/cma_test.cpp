// What is particular to cma: any memory, other processes, and kernels that refuse.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cma/access.h"
#include "tests/bare_copy.h"

namespace kvxfer::test {
namespace {

// From now on the kernel refuses a system call to this thread, and to those that it starts; of process_vm_readv and
// process_vm_writev those with so many pieces and more.
void refuse(long call, int code, unsigned pieces = 0) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[4])),  // its low half
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, pieces, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(code)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  CHECK_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

// On a thread of its own, so that a filter ends with it.
template <typename Body>
void apart(const Body& body) {
  together([] {}, body);
}

PlanPieces one_piece(std::uint64_t bytes) {
  PlanPieces pieces;
  pieces.add(0, 0, bytes);
  return pieces;
}

TEST(cma, moves_any_memory) {
  std::vector<std::byte> heap(100'000, std::byte{0x21});
  std::byte stack[5000] = {};
  Pair pair(4096, {}, "cma");
  pair.a.region = pair.a.context->register_memory(heap.data(), heap.size(), MemoryKind::host);
  pair.b.region = pair.b.context->register_memory(stack, sizeof stack, MemoryKind::host);
  pair.a.peer->import_keys(pair.b.context->export_keys({&pair.b.region, 1}));
  pair.b.peer->import_keys(pair.a.context->export_keys({&pair.a.region, 1}));
  const std::vector<std::uint32_t> region{1}, start{0};
  const std::vector<std::uint64_t> far{50'001}, near{1}, length{4998};
  std::shared_ptr<Plan> push, target;
  together([&] { push = pair.a.context->prepare(*pair.a.peer, {region, far, region, near, length, start}, soon()); },
           [&] { target = pair.b.context->prepare(*pair.b.peer, {region, near, region, far, length, start}, soon()); });
  pair.a.context->post(*push, Op::push, {}, 1, nullptr);
  pair.a.wait(EventKind::confirmed, 1);
  CHECK(stack[0] == std::byte{0} && stack[1] == std::byte{0x21} && stack[4998] == std::byte{0x21});
  CHECK(stack[4999] == std::byte{0});
  CHECK_EQ(pair.a.peer->describe().front(), "cma/process_vm");
}

TEST(cma, as_many_pieces_per_call_as_asked_for) {
  for (const std::int64_t most : {1, 7, 1024}) {
    Pair pair(1 << 20, {{"pieces_per_call", most}}, "cma");
    PlanPieces pieces;
    for (std::uint64_t i = 0; i < 3000; ++i) pieces.add(i * 300, (2999 - i) * 300, i % 3 == 0 ? 0 : 299);
    const auto plans = pair.prepare(pieces);
    pair.b.context->post(*plans.second, Op::pull, {}, 1, nullptr);
    pair.b.wait(EventKind::confirmed, 1);
    CHECK_EQ(pair.arrived(pieces), 3000U);
  }
}

// Eight pages of which the last half is not there any more.
struct HalfGone {
  std::byte* address =
      static_cast<std::byte*>(::mmap(nullptr, 8 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  HalfGone() { CHECK(::mprotect(address + 4 * 4096, 4 * 4096, PROT_NONE) == 0); }
  ~HalfGone() { ::munmap(address, 8 * 4096); }
};

TEST(cma, memory_that_is_gone_loses_the_peer_after_what_is_there) {
  const HalfGone memory;
  BareCopy bare("cma", 8 * 4096);
  bare.import(reinterpret_cast<std::uintptr_t>(memory.address), 8 * 4096);
  bare.prepare();
  std::memset(bare.end.region.address, 0x77, bare.end.region.bytes);
  bare.end.context->post(*bare.plan, Op::push, {}, 1, nullptr);
  bare.check_lost("is not there (any more)");
  bare.end.wait(EventKind::error, 1);
  CHECK(memory.address[4 * 4096 - 1] == std::byte{0x77});
}

TEST(cma, keys_of_memory_that_is_not_there_are_refused) {
  PlanPieces pieces = one_piece(64);
  for (const auto& [place, bytes] : {std::pair<std::uint64_t, std::uint64_t>{0, 64}, {UINT64_MAX - 8, 64}}) {
    BareCopy bare("cma");
    bare.import(place, bytes);
    CHECK_THROWS(Fault::usage, "memory that cannot be", bare.end.prepare(pieces));
  }
  const HalfGone memory;
  BareCopy bare("cma", 4096);
  bare.import(reinterpret_cast<std::uintptr_t>(memory.address + 4 * 4096), 4096);
  CHECK_THROWS(Fault::usage, "is not there", bare.prepare());
}

TEST(cma, probe_tells_when_the_kernel_refuses) {
  CHECK(find_backend("cma").probe().available);
  for (const auto& [call, code] :
       {std::pair{SYS_process_vm_readv, EPERM}, {SYS_process_vm_readv, ENOSYS}, {SYS_process_vm_writev, EPERM}})
    apart([&] {
      refuse(call, code);
      const Probe found = find_backend("cma").probe();
      CHECK(!found.available);
      for (const char* part : {"ptrace_scope", "seccomp", "SYS_PTRACE", "use backend shm or tcp"})
        CHECK(found.why_not.find(part) != std::string::npos);
      CHECK(found.why_not.find(std::strerror(code)) != std::string::npos);
    });
  CHECK(find_backend("cma").probe().available);
}

TEST(cma, probe_tells_when_yama_keeps_processes_apart) {
  for (const bool may_trace : {false, true})
    for (const int allowed : {0, 1}) CHECK_EQ(cma::why_yama_refuses(allowed, may_trace), "");
  CHECK_EQ(cma::why_yama_refuses(2, true), "");
  const std::string without = cma::why_yama_refuses(2, false);
  for (const char* part : {"ptrace_scope is 2", "CAP_SYS_PTRACE", "sysctl", "use backend shm or tcp"})
    CHECK(without.find(part) != std::string::npos);
  for (const bool may_trace : {false, true})
    CHECK(cma::why_yama_refuses(3, may_trace).find("ptrace_scope is 3: no process") != std::string::npos);
}

TEST(cma, a_refusal_either_way_is_told_by_prepare) {
  for (const long call : {SYS_process_vm_readv, SYS_process_vm_writev}) {
    Pair pair(4096, {}, "cma");
    apart([&] {
      refuse(call, EPERM);
      together([&] { CHECK_THROWS(Fault::unavailable, "the kernel refuses access", pair.a.prepare(one_piece(64))); },
               [&] { CHECK_THROWS(Fault::unavailable, "ptrace_scope", pair.b.prepare(one_piece(64))); });
    });
    CHECK_EQ(pair.a.peer->lost(), "");
    CHECK(*pair.b.at(0) == std::byte{0xDB});
  }
}

TEST(cma, a_refusal_in_mid_transfer_loses_the_peer) {
  apart([] {
    refuse(SYS_process_vm_writev, EPERM, 2);  // and not what prepare tries
    Pair pair(4096, {}, "cma");
    PlanPieces pieces = one_piece(64);
    pieces.add(100, 100, 64);
    const auto plans = pair.prepare(pieces);
    pair.a.context->post(*plans.first, Op::push, {}, 1, nullptr);
    pair.a.wait(EventKind::error, 1);
    pair.a.wait(EventKind::peer_lost, 0);
    CHECK(pair.a.peer->lost().find("the kernel refuses access") != std::string::npos);
  });
}

TEST(cma, a_process_that_is_gone_is_told_so) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
  char here = 0;
  const iovec local{&here, 1};
  CHECK_EQ(cma::call(Op::pull, child, {&local, 1}, {&local, 1}), -ESRCH);
}

TEST(cma, nothing_is_written_into_memory_of_a_context_that_has_closed) {
  constexpr std::uint64_t bytes = 8 << 20;
  const std::vector<std::byte> expected(bytes, std::byte{0x55});
  for (int round = 0; round < 8; ++round) {
    Pair pair(bytes, {}, "cma");
    const auto plans = pair.prepare(one_piece(bytes));
    for (std::uint64_t tag = 1; tag <= 32; ++tag) pair.a.context->post(*plans.first, Op::push, {}, tag, nullptr);
    while (pair.a.context->bytes_moved() == 0) std::this_thread::yield();
    pair.b.context->close();
    std::memset(pair.b.region.address, 0x55, bytes);
    pair.a.wait(EventKind::peer_lost, 0);
    pair.a.context->close();  // its threads have ended
    CHECK(std::memcmp(pair.b.at(0), expected.data(), bytes) == 0);
  }
}

}  // namespace
}  // namespace kvxfer::test
