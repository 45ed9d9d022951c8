// A backend to copy: the smallest true one. It pushes bytes over one TCP connection, and is complete in what it does.
// docs/adding-a-backend.md walks through it. It is built and tested, but it is in no registry: nobody is offered it.
#pragma once

#include <memory>

#include "backend/registry.h"

namespace kvxfer::skeleton {

Probe probe();
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::skeleton
