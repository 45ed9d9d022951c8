// The kernel's copies between processes, and whether it allows them.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <span>
#include <string>

#include "backend/backend.h"

namespace kvxfer::cma {

// One call of process_vm_readv (pull) or process_vm_writev (push). The bytes copied, or minus the error code.
ssize_t call(Op op, pid_t process, std::span<const iovec> local, std::span<const iovec> remote);

// Whether the kernel allows writes into a process, found out without writing: 0, or the error code.
int try_to_write(pid_t process);

// What a refused call means and what to do about it.
std::string why_refused(int code);

// Why Yama refuses every process to every other, "" when it does not. `scope`: kernel.yama.ptrace_scope, 0 without
// Yama; `may_trace`: this process has CAP_SYS_PTRACE.
std::string why_yama_refuses(int scope, bool may_trace);
// Of this kernel and this process.
std::string why_yama_refuses();

}  // namespace kvxfer::cma
