#include "backends/cma/access.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace kvxfer::cma {

namespace {

// Of kernel.yama.ptrace_scope, as the kernel's documentation has them.
constexpr int only_with_capability = 2, never = 3;

bool has_sys_ptrace() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3]{};
  if (::syscall(SYS_capget, &header, sets) != 0) return false;
  return (sets[CAP_TO_INDEX(CAP_SYS_PTRACE)].effective & CAP_TO_MASK(CAP_SYS_PTRACE)) != 0;
}

}  // namespace

ssize_t call(Op op, pid_t process, std::span<const iovec> local, std::span<const iovec> remote) {
  const auto made = op == Op::push ? ::process_vm_writev : ::process_vm_readv;
  const ssize_t done = made(process, local.data(), local.size(), remote.data(), remote.size(), 0);
  return done < 0 ? -errno : done;
}

// Leave comes before the look at the address, and no process has memory on the last page of the address space.
int try_to_write(pid_t process) {
  char byte = 0;
  const iovec local{&byte, 1};
  const iovec remote{reinterpret_cast<void*>(UINTPTR_MAX), 1};
  const ssize_t done = call(Op::push, process, {&local, 1}, {&remote, 1});
  return done >= 0 || done == -EFAULT ? 0 : static_cast<int>(-done);
}

std::string why_refused(int code) {
  return std::string("the kernel refuses access to another process's memory (process_vm_readv or process_vm_writev: ") +
         std::strerror(code) +
         "): both processes must belong to one user, kernel.yama.ptrace_scope must be 0 or 1, and neither a seccomp "
         "filter nor a container's limits may forbid it (docker: --cap-add SYS_PTRACE); or use backend shm or tcp";
}

std::string why_yama_refuses(int scope, bool may_trace) {
  if (scope < only_with_capability || (scope < never && may_trace)) return {};
  const std::string now = "kernel.yama.ptrace_scope is " + std::to_string(scope);
  if (scope < never)
    return now +
           ": only a process with CAP_SYS_PTRACE may reach into another. Set it to 0 or 1 (sysctl -w "
           "kernel.yama.ptrace_scope=1), give both processes the capability (docker: --cap-add SYS_PTRACE), or "
           "use backend shm or tcp";
  return now + ": no process may reach into another until the host is booted with 0 or 1 there; use backend shm or tcp";
}

std::string why_yama_refuses() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;  // no such file without Yama
  return why_yama_refuses(scope, has_sys_ptrace());
}

}  // namespace kvxfer::cma
