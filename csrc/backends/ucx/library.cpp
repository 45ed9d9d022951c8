#include "backends/ucx/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "backend/error.h"
#include "backends/ucx/bundled.h"
#include "backends/ucx/ucx.h"

namespace kvxfer::ucx {

namespace fs = std::filesystem;

namespace {

// The first with client ids, which tell our peer from a stranger, and with registered memory given to put and get that
// this was tried with.
constexpr unsigned least_major = 1, least_minor = 13;
constexpr const char* named_by = "KVXFER_UCX_LIBRARY";
constexpr const char* soname = "libucp.so.0";
constexpr const char* how_to_get =
    "pip install libucx-cu12 brings one without RDMA; for RDMA install the system's "
    "(Debian, Ubuntu: libucx0) or name another by KVXFER_UCX_LIBRARY";

std::vector<std::string>& package_folders() {
  static std::vector<std::string> folders;
  return folders;
}

bool there_is(const fs::path& path) {
  std::error_code code;
  return fs::exists(path, code);
}

// Of a libucp: libuct_NAME.so… in ucx/ beside it.
std::vector<std::string> modules_beside(const fs::path& library) {
  std::vector<std::string> names;
  std::error_code code;
  const fs::path real = fs::canonical(library, code);
  if (code) return names;
  for (const auto& entry : fs::directory_iterator(real.parent_path() / "ucx", code)) {
    const std::string file = entry.path().filename().string();
    constexpr std::string_view prefix = "libuct_";
    const std::size_t end = file.find(".so");
    if (file.starts_with(prefix) && end != std::string::npos)
      names.push_back(file.substr(prefix.size(), end - prefix.size()));
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// Where the loader would find a system's library, without loading it: only one may ever be loaded.
std::vector<fs::path> system_libraries() {
  std::vector<fs::path> folders;
  if (const char* given = std::getenv("LD_LIBRARY_PATH")) {
    std::string text = given;
    for (std::size_t from = 0; from <= text.size();) {
      const std::size_t to = std::min(text.find(':', from), text.size());
      if (to > from) folders.emplace_back(text.substr(from, to - from));
      from = to + 1;
    }
  }
  for (const char* folder : {"/opt/mellanox/ucx/lib", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu",
                             "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib"})
    folders.emplace_back(folder);
  std::vector<fs::path> found;
  for (const fs::path& folder : folders)
    if (there_is(folder / soname)) found.push_back(folder / soname);
  return found;
}

std::vector<fs::path> packaged_libraries() {
  std::vector<fs::path> found;
  for (const std::string& folder : package_folders())
    if (const fs::path path = fs::path(folder) / "libucx" / "lib" / soname; there_is(path)) found.push_back(path);
  return found;
}

struct Choice {
  fs::path path;     // empty: there is only the bundled one
  fs::path bundled;  // a NIXL wheel's, which comes first where the system's verbs can be used with it; empty: none
};

// An explicit one; else, where RDMA devices exist, one with verbs; else the package's; else what there is.
Choice choose() {
  if (const char* named = std::getenv(named_by); named != nullptr && *named != '\0') {
    if (!there_is(named))
      throw Error(Fault::unavailable, std::string(named_by) + "=" + named + ": there is no such file");
    return {fs::absolute(named), {}};  // a bare name would be looked for elsewhere
  }
  const std::vector<fs::path> system = system_libraries(), packaged = packaged_libraries();
  Choice choice;
  if (has_rdma_devices()) {
    for (const fs::path& path : system)
      if (contains(modules_beside(path), "ib")) return {path, {}};
    choice.bundled = bundled_in(package_folders());
  }
  if (!packaged.empty())
    choice.path = packaged.front();
  else if (!system.empty())
    choice.path = system.front();
  if (!choice.path.empty() || !choice.bundled.empty()) return choice;
  throw Error(Fault::unavailable, std::string("no UCX here: ") + how_to_get);
}

// Opens the library with what it reads of its environment when it is loaded; what the user has set stays, and nothing
// else, so that no child of this process takes it for the user's. UCX writes to stdout otherwise, where results go, and
// what it would say of a lost peer is this side's to tell.
void* load_quietly(const fs::path& path) {
  // No signal handlers: they are the application's.
  constexpr std::pair<const char*, const char*> wanted[] = {{"UCX_LOG_FILE", "stderr"},
                                                            {"UCX_LOG_LEVEL", "fatal"},
                                                            {"UCX_HANDLE_ERRORS", "none"},
                                                            {"UCX_WARN_UNUSED_ENV_VARS", "n"}};
  std::vector<const char*> set;
  for (const auto& [name, value] : wanted) {
    if (std::getenv(name) != nullptr) continue;
    ::setenv(name, value, 0);
    set.push_back(name);
  }
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  for (const char* name : set) ::unsetenv(name);
  return handle;
}

// Before anything else is looked for: what a version has not, its number explains.
void require_version(const Library& found) {
  if (found.major == least_major && found.minor >= least_minor) return;
  throw Error(Fault::unavailable, found.path + " is UCX " + found.version +
                                      ", and it takes 1.13 or a later 1.x: earlier ones have no "
                                      "client ids, which tell the peer from a stranger; " +
                                      how_to_get);
}

// Leaves in `choice.path` what was opened, and in `why_not` why a bundled one, if there is one, cannot use its verbs.
void* open(Choice& choice, std::string& why_not) {
  if (!choice.bundled.empty()) {
    const Opened opened = open_bundled(choice.bundled, load_quietly);
    if (!opened.why_not.empty())
      why_not = choice.bundled.string() + " has verbs, but cannot be used: " + opened.why_not;
    if (opened.handle != nullptr) {
      choice.path = choice.bundled;
      return opened.handle;
    }
    if (choice.path.empty()) throw Error(Fault::unavailable, "no UCX here: " + why_not + "; " + how_to_get);
  }
  void* const handle = load_quietly(choice.path);
  if (handle == nullptr) throw Error(Fault::unavailable, std::string("UCX cannot be loaded: ") + ::dlerror());
  return handle;
}

// What nobody should overlook where there are RDMA devices.
std::string warn_of(const Library& found, const std::string& why_not) {
  if (found.has("ib") && why_not.empty()) return {};
  std::string text = "this machine has RDMA devices, and the UCX in use ";
  text += found.has("ib") ? "cannot use them" : "was built without verbs";
  text += ": it will use TCP. ";
  if (!why_not.empty()) text += why_not + ". ";
  return text + "Install the system's (Debian, Ubuntu: libucx0), or name one with verbs by KVXFER_UCX_LIBRARY";
}

Library load() {
  Choice choice = choose();
  std::string why_not;
  void* const handle = open(choice, why_not);
  Library found;
  found.path = choice.path.string();
  const auto look_up = [&]<typename Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (function == nullptr)
      throw Error(Fault::unavailable, found.path + " is no UCX that can be used: it has no " + name);
  };
  look_up(found.ucp_get_version, "ucp_get_version");
  if (Dl_info info{}; ::dladdr(reinterpret_cast<void*>(found.ucp_get_version), &info) != 0) found.path = info.dli_fname;
  unsigned release = 0;
  found.ucp_get_version(&found.major, &found.minor, &release);
  found.version = std::to_string(found.major) + "." + std::to_string(found.minor) + "." + std::to_string(release);
  require_version(found);
#define KVXFER_UCP_LOOK_UP(name) look_up(found.name, #name);
  KVXFER_UCP_FUNCTIONS(KVXFER_UCP_LOOK_UP)
#undef KVXFER_UCP_LOOK_UP
  found.modules = modules_beside(found.path);
  if (has_rdma_devices()) found.warning = warn_of(found, why_not);
  return found;
}

}  // namespace

bool Library::has(const std::string& module) const { return contains(modules, module); }

std::string Library::transports() const {
  std::string text = "self,tcp,sysv,posix";
  for (const std::string& module : modules) text += "," + module;
  return text;
}

void look_in(std::vector<std::string> folders) { package_folders() = std::move(folders); }

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

std::string why(const std::string& text, ucs_status_t status) {
  return text + ": " + library().ucs_status_string(status);
}

bool present() {
  try {
    choose();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool has_rdma_devices() {
  std::error_code code;
  const fs::directory_iterator devices("/sys/class/infiniband", code);
  return !code && devices != fs::directory_iterator();
}

}  // namespace kvxfer::ucx
