// SPDX-License-Identifier: Apache-2.0
//
// The error codes of the CUDA driver API by name, for the simulated driver's cuGetErrorName and for the
// text of faults. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_ERRORS_H_
#define RESIDENCY_MECHANISMS_SIM_ERRORS_H_

#include <cuda.h>

#include <optional>
#include <string_view>

namespace residency {

// "CUDA_ERROR_OUT_OF_MEMORY" and the like; nullptr for a code that is none.
const char* SimErrorName(CUresult error);

// The code whose name is CUDA_ERROR_ followed by `suffix`.
std::optional<CUresult> SimErrorFromSuffix(std::string_view suffix);

// True for errors after which CUDA documents the context as unusable: the device's state is inconsistent
// and every later call on the context answers the same error.
bool IsSticky(CUresult error);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_ERRORS_H_
