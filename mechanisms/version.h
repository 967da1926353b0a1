// SPDX-License-Identifier: Apache-2.0
#ifndef RESIDENCY_MECHANISMS_VERSION_H_
#define RESIDENCY_MECHANISMS_VERSION_H_

namespace residency {

// Of the project: what residencyd, residencyctl and the client library call themselves.
inline constexpr char kVersion[] = "0.1.0";

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_VERSION_H_
