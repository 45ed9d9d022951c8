#include "backends/ucx/bundled.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace kvxfer::ucx {

namespace fs = std::filesystem;

namespace {

// The first file in the folder whose name begins so; empty: none.
fs::path file_in(const fs::path& folder, std::string_view prefix) {
  std::error_code code;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder, code))
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  std::ranges::sort(found);
  return found.empty() ? fs::path() : found.front();
}

fs::path verbs_module(const fs::path& library) { return file_in(library.parent_path() / "ucx", "libuct_ib.so."); }

// Private, and gone with whatever is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::error_code code;
    std::string name = (fs::temp_directory_path(code) / "kvxfer-ucx-XXXXXX").string();
    if (!code && ::mkdtemp(name.data()) == nullptr) code = {errno, std::generic_category()};
    if (code) throw std::runtime_error("no temporary folder can be made (see TMPDIR): " + code.message());
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code code;
    fs::remove_all(path_, code);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Where the loader has a library, which it loads for that; empty: dlerror() says why not.
fs::path loaded_from(const std::string& name) {
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  link_map* map = nullptr;
  if (handle == nullptr || ::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0) return {};
  return map->l_name;
}

// The names of libibverbs' symbol versions that are in a file, whether it has or needs them.
std::set<std::string> verbs_versions(const fs::path& file) {
  constexpr std::string_view prefix = "IBVERBS_1.";
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::set<std::string> found;
  for (std::size_t at = bytes.find(prefix); at != std::string::npos; at = bytes.find(prefix, at + 1))
    found.insert(bytes.c_str() + at);
  return found;
}

// Asked before any UCX is loaded, since after one no other can be.
std::string lacks(const fs::path& verbs, const fs::path& module) {
  const std::set<std::string> has = verbs_versions(verbs);
  for (const std::string& needed : verbs_versions(module))
    if (!has.contains(needed)) return verbs.string() + " is too old for it: it has no " + needed;
  return {};
}

// Opens a module of the loaded UCX by a link in `links`, so that the loader looks there for what the module needs; a
// library keeps each name that it was once found by, and the module is the same file when UCX opens it by its own path.
bool open_by_link(const fs::path& module, const fs::path& links) {
  const fs::path link = links / "ucx" / module.filename();
  fs::create_symlink(module, link);
  return ::dlopen(link.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr;
}

// That libmlx5 of the bundle refuses the devices of the system's libibverbs, which are then driven without what only
// mlx5 has. So it is the system's where there is one; where that does not fit, it stays at plain verbs.
void take_system_mlx5(const fs::path& library, const fs::path& links) {
  const fs::path bundled = file_in(library.parent_path(), "libmlx5-");
  const fs::path module = file_in(library.parent_path() / "ucx", "libuct_ib_mlx5.so.");
  if (bundled.empty() || module.empty()) return;
  const fs::path system = loaded_from("libmlx5.so.1");
  if (system.empty()) return;
  fs::create_symlink(system, links / bundled.filename());
  open_by_link(module, links);
}

}  // namespace

fs::path bundled_in(const std::vector<std::string>& package_folders) {
  for (const std::string& folder : package_folders)
    for (const char* wheel : {"nixl_cu12.libs", "nixl_cu13.libs"})
      if (const fs::path library = file_in(fs::path(folder) / wheel, "libucp-");
          !library.empty() && !verbs_module(library).empty())
        return fs::absolute(library);  // links will point to it
  return {};
}

Opened open_bundled(const fs::path& library, const std::function<void*(const fs::path&)>& open,
                    const std::string& verbs) {
  Opened opened;
  try {
    const fs::path system = loaded_from(verbs);
    if (system.empty()) return {nullptr, std::string("the system has no libibverbs.so.1 for it: ") + ::dlerror()};
    const fs::path bundled = file_in(library.parent_path(), "libibverbs-"), module = verbs_module(library);
    if (std::string why_not = lacks(system, module); !why_not.empty()) return {nullptr, why_not};
    const TemporaryFolder links;
    fs::create_directory(links.path() / "ucx");
    if (!bundled.empty()) fs::create_symlink(system, links.path() / bundled.filename());
    opened.handle = open(library);
    if (opened.handle == nullptr) return {nullptr, ::dlerror()};
    take_system_mlx5(library, links.path());
    if (!open_by_link(module, links.path())) opened.why_not = ::dlerror();
  } catch (const std::exception& error) {
    opened.why_not = error.what();
  }
  return opened;
}

}  // namespace kvxfer::ucx
