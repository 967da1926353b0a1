// SPDX-License-Identifier: Apache-2.0
//
// Status and tables of tensors as text for people: sizes in GiB, what was promised beside what was measured, and a note
// where the two differ. Fits 80 columns unless a name is longer. Pure; any thread.
#ifndef RESIDENCY_CLIENT_CTL_STATUS_TEXT_H_
#define RESIDENCY_CLIENT_CTL_STATUS_TEXT_H_

#include <string>

#include "proto/residency.pb.h"

namespace residency {

std::string StatusText(const v1::Status& status);

// A line for each tensor: name, dtype, shape, bytes; `table` is all pieces merged.
std::string TensorsText(const v1::ListTensorsResponse& table);

// "2h03m", "4m10s", "12s", "0.3s".
std::string AgeText(double seconds);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_STATUS_TEXT_H_
