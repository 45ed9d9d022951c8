#include "backend/registry.h"

#include <sys/utsname.h>

#include <cstring>

#include "backends/cma/cma.h"
#include "backends/null/null.h"
#include "backends/shm/shm.h"
#include "backends/tcp/tcp.h"
#include "backends/ucx/ucx.h"

namespace kvxfer {

Error system_error(Fault fault, const std::string& what, int code) {
  return Error(fault, what + ": " + std::strerror(code));
}

namespace {
constexpr BackendRow rows[] = {
    {"tcp", "kernel TCP sockets, scatter/gather straight between blocks and socket", false, tcp::probe, tcp::open},
    {"ucx", "UCX: one-sided put and get over RDMA, TCP or shared memory, as it finds them", false, ucx::probe,
     ucx::open, ucx::present},
    {"shm", "shared memory of two processes on one host, one copy from block to block", true, shm::probe, shm::open},
    {"cma", "the kernel copies between two processes on one host (process_vm_readv)", true, cma::probe, cma::open},
    {"null", "moves nothing: what the harness itself costs", false, null::probe, null::open},
};
}  // namespace

std::span<const BackendRow> backends() { return rows; }

Probe kernel_probe(std::string transports) {
  Probe found;
  found.library_path = "kernel";
  utsname name{};
  if (::uname(&name) == 0) found.library_version = std::string(name.sysname) + " " + name.release;
  found.transports = std::move(transports);
  return found;
}

const BackendRow& find_backend(const std::string& name) {
  std::string known;
  for (const BackendRow& row : rows) {
    if (name == row.name) return row;
    known += known.empty() ? row.name : std::string(", ") + row.name;
  }
  throw Error(Fault::usage, "unknown backend '" + name + "'; this build has " + known);
}

std::int64_t option(const Options& options, const OptionBounds& bounds) {
  const auto found = options.find(bounds.name);
  if (found == options.end()) return bounds.otherwise;
  if (found->second < bounds.low || found->second > bounds.high)
    throw Error(Fault::usage, std::string(bounds.name) + "=" + std::to_string(found->second) + " is outside " +
                                  std::to_string(bounds.low) + "…" + std::to_string(bounds.high));
  return found->second;
}

void refuse_unknown(const Options& options, std::span<const OptionBounds> known) {
  std::string names;
  for (const OptionBounds& bounds : known) names += names.empty() ? bounds.name : std::string(", ") + bounds.name;
  for (const auto& [name, value] : options) {
    bool found = false;
    for (const OptionBounds& bounds : known) found = found || name == bounds.name;
    if (!found)
      throw Error(Fault::usage, "unknown backend option '" + name + "'; " +
                                    (names.empty() ? "this backend has none" : "this backend has " + names));
  }
}

}  // namespace kvxfer
