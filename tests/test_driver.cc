// SPDX-License-Identifier: Apache-2.0
#include "tests/test_driver.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "mechanisms/open_driver.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// Removed when the process ends.
struct SimFolder {
  SimFolder() {
    char name[] = "/dev/shm/residency-test-XXXXXX";
    if (mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~SimFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string path;
};

Driver Open() {
  static const SimFolder folder;
  const auto kind = ParseDriverKind(TestDriverName());
  if (!kind.ok()) throw std::runtime_error(kind.status().ToString());
  auto driver = OpenDriver(*kind, SimOptions{.directory = folder.path, .device_bytes = 2 * kGiB});
  if (!driver.ok()) throw std::runtime_error(driver.status().ToString());
  return *driver;
}

}  // namespace

std::string TestDriverName() {
  const char* name = std::getenv("RESIDENCY_TEST_DRIVER");
  return name == nullptr || *name == '\0' ? "sim" : name;
}

const Driver& TestDriver() {
  static const Driver driver = Open();
  return driver;
}

std::unique_ptr<Device> OpenTestDevice(const Driver& driver) {
  auto device = Device::Open(driver, 0);
  if (!device.ok()) throw std::runtime_error(device.status().ToString());
  return *std::move(device);
}

}  // namespace residency
