// UCX: one-sided put and get over whatever UCX finds between two processes, from a libucp that is opened at run time.
#pragma once

#include "backend/registry.h"

namespace kvxfer::ucx {

// Folders that may hold Python packages with a UCX in them. Before the first probe().
void look_in(std::vector<std::string> folders);
Probe probe();
bool present();  // a library that could be loaded
std::unique_ptr<Context> open(const Token& token, const Options& options);

}  // namespace kvxfer::ucx
