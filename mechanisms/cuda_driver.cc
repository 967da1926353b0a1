// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/cuda_driver.h"

#include <dlfcn.h>

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

// Two steps, so that the name is expanded by cuda.h's macros (to the versioned symbol) before it becomes text.
#define RESIDENCY_TEXT_OF(name) #name
#define RESIDENCY_SYMBOL(name) RESIDENCY_TEXT_OF(name)

namespace residency {
namespace {

absl::Status NoDriver(const std::string& what) {
  return Refuse(absl::StatusCode::kUnavailable, "NO_DRIVER",
                absl::StrCat(what, "; a machine without a GPU can use --driver=sim"));
}

// The symbol, or nullptr. Drivers before 12.8 have cuEventElapsedTime under its first name only; the signature is the
// same. No other versioned symbol may fall back like this: their first versions take narrower types.
void* FindSymbol(void* library, const char* symbol, std::string_view documented_name) {
  if (void* found = dlsym(library, symbol)) return found;
  if (documented_name == "cuEventElapsedTime") return dlsym(library, "cuEventElapsedTime");
  return nullptr;
}

}  // namespace

absl::StatusOr<Driver> LoadCudaDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return NoDriver(absl::StrCat("the CUDA driver library does not open: ", error ? error : "libcuda.so.1"));
  }
  Driver driver;
#define RESIDENCY_LOAD_ENTRY(name)                                                                           \
  driver.name = reinterpret_cast<decltype(driver.name)>(FindSymbol(library, RESIDENCY_SYMBOL(name), #name)); \
  if (driver.name == nullptr) {                                                                              \
    return NoDriver(absl::StrCat("libcuda.so.1 has no function ", RESIDENCY_SYMBOL(name)));                  \
  }
  RESIDENCY_DRIVER_CALLS(RESIDENCY_LOAD_ENTRY)
#undef RESIDENCY_LOAD_ENTRY
  return driver;
}

}  // namespace residency
