// The UCX in a NIXL wheel. It has verbs, but with copies of libibverbs and libmlx5 that find none of the system's
// drivers, and a libnl-route that ends the process with a crash: so it is given the system's libraries instead.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace kvxfer::ucx {

// The libucp of a NIXL wheel in one of these folders of Python packages; empty: none that has verbs.
std::filesystem::path bundled_in(const std::vector<std::string>& package_folders);

struct Opened {
  void* handle = nullptr;  // nullptr: nothing of it is loaded
  std::string why_not;     // it cannot use the system's verbs; empty: it does
};

// Opens such a libucp by `open`, with the system's verbs, which the loader finds by the name `verbs`. Throws nothing.
Opened open_bundled(const std::filesystem::path& library,
                    const std::function<void*(const std::filesystem::path&)>& open,
                    const std::string& verbs = "libibverbs.so.1");

}  // namespace kvxfer::ucx
