// In place of the backend where its headers were not found at build time.
#include "backends/ucx/ucx.h"

namespace kvxfer::ucx {

namespace {
constexpr const char* absent =
    "this build was made without UCX's headers; install them (pip install libucx-cu12, or the system's libucx-dev) and "
    "build kvxfer again";
}

Probe probe() {
  Probe found;
  found.why_not = absent;
  return found;
}

std::unique_ptr<Context> open(const Token&, const Options&) { throw Error(Fault::unavailable, absent); }

bool present() { return false; }

void look_in(std::vector<std::string>) {}

}  // namespace kvxfer::ucx
