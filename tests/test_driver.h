// SPDX-License-Identifier: Apache-2.0
//
// The driver that a test runs against: RESIDENCY_TEST_DRIVER, "sim" (also where it is not set) or "cuda".
#ifndef RESIDENCY_TESTS_TEST_DRIVER_H_
#define RESIDENCY_TESTS_TEST_DRIVER_H_

#include <memory>
#include <string>

#include "mechanisms/device.h"
#include "mechanisms/driver.h"

namespace residency {

// "sim" or "cuda".
std::string TestDriverName();

// The table, opened once in the process; a simulated card of 2 GiB in a folder of its own that goes with the process.
// Throws where it cannot be opened: a test that asked for a GPU and has none has failed.
const Driver& TestDriver();

// Its first device, through `driver`, which may be a table in which the test has replaced entries.
std::unique_ptr<Device> OpenTestDevice(const Driver& driver = TestDriver());

}  // namespace residency

#endif  // RESIDENCY_TESTS_TEST_DRIVER_H_
