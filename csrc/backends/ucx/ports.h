// The ports on which UCX takes connections of its own. Whoever connects there is believed: UCX knows no key, and writes
// where a message says.
#pragma once

#include <functional>
#include <vector>

namespace kvxfer::ucx {

// The sockets of this process on which `open` begins to take connections. Other threads should begin none meanwhile,
// save through here.
std::vector<int> listeners_of(const std::function<void()>& open);

// From now on the kernel drops whatever knocks there. Connections that are made stay.
void admit_nobody(const std::vector<int>& listeners) noexcept;

}  // namespace kvxfer::ucx
