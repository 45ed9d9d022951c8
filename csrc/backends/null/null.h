// The null backend moves nothing: a post goes to the passive side as a notice and comes back as its confirmation. What
// a run over it costs is what the harness itself costs.
#pragma once

#include <memory>

#include "backend/registry.h"

namespace kvxfer::null {

Probe probe();
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::null
