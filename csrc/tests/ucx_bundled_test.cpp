// The UCX of a NIXL wheel: found where it has verbs, and given the system's libibverbs. Of files that are made up.
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "backends/ucx/bundled.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

namespace fs = std::filesystem;

const fs::path bundle = BUNDLE;  // packages/nixl_cu12.libs/, and in system/ and old/ a libibverbs.so.1
const fs::path library = bundle / "packages/nixl_cu12.libs/libucp-0a.so.0.0.0";
const fs::path module = library.parent_path() / "ucx/libuct_ib.so.0.0.0";

// A new folder, in which temporary files are made for as long as it is there.
class Temporary {
 public:
  Temporary() {
    std::string name = (fs::temp_directory_path() / "kvxfer-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw Failure("no temporary folder");
    path = name;
    ::setenv("TMPDIR", path.c_str(), 1);
  }
  ~Temporary() {
    if (before_.empty())
      ::unsetenv("TMPDIR");
    else
      ::setenv("TMPDIR", before_.c_str(), 1);
    fs::remove_all(path);
  }

  fs::path path;

 private:
  std::string before_ = std::getenv("TMPDIR") != nullptr ? std::getenv("TMPDIR") : "";
};

void* plainly(const fs::path& path) { return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); }

bool loaded(const fs::path& path) { return ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr; }

// Nothing is loaded, so that another UCX can be.
void refused(const std::string& verbs, const std::string& says) {
  const ucx::Opened opened = ucx::open_bundled(library, plainly, verbs);
  CHECK(opened.handle == nullptr);
  CHECK(opened.why_not.find(says) != std::string::npos);
  CHECK(!loaded(library));
}

TEST(ucx_bundled, found_in_a_folder_of_packages) {
  CHECK_EQ(ucx::bundled_in({"/nowhere", bundle / "packages"}), library);
  CHECK(ucx::bundled_in({}).empty());
  CHECK(ucx::bundled_in({bundle}).empty());
}

TEST(ucx_bundled, left_alone_where_it_has_no_verbs) {
  const Temporary temporary;
  const fs::path wheel = temporary.path / "nixl_cu13.libs";
  fs::create_directories(wheel / "ucx");
  std::ofstream(wheel / "libucp-1b.so.0.0.0").put('\n');
  CHECK(ucx::bundled_in({temporary.path}).empty());
  std::ofstream(wheel / "ucx" / "libuct_ib.so.0.0.0").put('\n');
  CHECK_EQ(ucx::bundled_in({temporary.path}), wheel / "libucp-1b.so.0.0.0");
}

TEST(ucx_bundled, refused_where_the_system_has_no_libibverbs) {
  refused("libibverbs-of-nobody.so.1", "the system has no libibverbs.so.1 for it: libibverbs-of-nobody.so.1");
}

TEST(ucx_bundled, refused_where_the_systems_libibverbs_is_too_old) {
  const fs::path old = bundle / "old/libibverbs.so.1";
  refused(old, old.string() + " is too old for it: it has no IBVERBS_1.1");
}

TEST(ucx_bundled, refused_where_no_temporary_folder_can_be_made) {
  const Temporary temporary;
  ::setenv("TMPDIR", (temporary.path / "none").c_str(), 1);
  refused(bundle / "system/libibverbs.so.1", "no temporary folder can be made");
}

TEST(ucx_bundled, refused_where_it_cannot_be_loaded) {
  const auto fails = [](const fs::path&) { return ::dlopen("/nowhere/libucp.so.0", RTLD_NOW); };
  const ucx::Opened opened = ucx::open_bundled(library, fails, bundle / "system/libibverbs.so.1");
  CHECK(opened.handle == nullptr);
  CHECK(opened.why_not.find("/nowhere/libucp.so.0") != std::string::npos);
}

TEST(ucx_bundled, uses_the_systems_libibverbs_and_leaves_no_file) {
  const Temporary temporary;
  bool private_folder = false;
  const auto looking = [&](const fs::path& path) {
    for (const auto& made : fs::directory_iterator(temporary.path))
      private_folder = (made.status().permissions() & fs::perms::mask) == fs::perms::owner_all;
    return plainly(path);
  };
  const ucx::Opened opened = ucx::open_bundled(library, looking, bundle / "system/libibverbs.so.1");
  CHECK(opened.handle != nullptr);
  CHECK_EQ(opened.why_not, "");
  CHECK(private_folder);
  CHECK(fs::is_empty(temporary.path));
  // As UCX opens it, which now is by its own path.
  void* const opened_module = plainly(module);
  CHECK(opened_module != nullptr);
  const auto verbs_in_use = reinterpret_cast<const char* (*)()>(::dlsym(opened_module, "verbs_in_use"));
  CHECK_EQ(std::string(verbs_in_use()), "system");
  CHECK(!loaded(library.parent_path() / "libibverbs-0a.so.1"));
  Dl_info info{};
  CHECK(::dladdr(::dlsym(opened.handle, "whose_verbs"), &info) != 0);
  CHECK_EQ(info.dli_fname, library.string());
}

}  // namespace
}  // namespace kvxfer::test
