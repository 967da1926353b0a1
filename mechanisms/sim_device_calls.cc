// SPDX-License-Identifier: Apache-2.0
//
// The table's functions that ask about devices and handle contexts.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "mechanisms/sim_calls.h"
#include "mechanisms/sim_errors.h"

namespace residency {
namespace {

CUresult Init(unsigned int flags) {
  return SimCall("cuInit", SimNeeds::kNothing, [&](SimProcess& process, SimContext*) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    process.initialized = true;
    return CUDA_SUCCESS;
  });
}

CUresult DriverGetVersion(int* version) {
  return SimCall("cuDriverGetVersion", SimNeeds::kNothing, [&](SimProcess&, SimContext*) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
  });
}

CUresult GetErrorName(CUresult error, const char** name) {
  return SimCall("cuGetErrorName", SimNeeds::kNothing, [&](SimProcess&, SimContext*) {
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = SimErrorName(error);
    return *name != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// The name again: whoever reads it learns what the sentences of the real driver say, and that it was simulated.
CUresult GetErrorString(CUresult error, const char** text) {
  return SimCall("cuGetErrorString", SimNeeds::kNothing, [&](SimProcess&, SimContext*) {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *text = SimErrorName(error);
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult DeviceGetCount(int* count) {
  return SimCall("cuDeviceGetCount", SimNeeds::kInit, [&](SimProcess& process, SimContext*) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<int>(process.cards->size());
    return CUDA_SUCCESS;
  });
}

bool IsDevice(const SimProcess& process, CUdevice device) {
  return device >= 0 && static_cast<size_t>(device) < process.cards->size();
}

// The way into a call about one device.
template <typename Body>
CUresult DeviceCall(std::string_view name, CUdevice device, const void* answer, Body body) {
  return SimCall(name, SimNeeds::kInit, [&](SimProcess& process, SimContext*) {
    if (!IsDevice(process, device)) return CUDA_ERROR_INVALID_DEVICE;
    if (answer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return body(process);
  });
}

CUresult DeviceGet(CUdevice* device, int ordinal) {
  return DeviceCall("cuDeviceGet", ordinal, device, [&](SimProcess&) {
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetName(char* name, int name_bytes, CUdevice device) {
  return DeviceCall("cuDeviceGetName", device, name, [&](SimProcess&) {
    if (name_bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
    std::strncpy(name, "Simulated GPU", name_bytes - 1);
    name[name_bytes - 1] = '\0';
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return DeviceCall("cuDeviceGetUuid", device, uuid, [&](SimProcess& process) {
    const SimCard::Uuid& bytes = process.cards->card(device).uuid();
    static_assert(sizeof(uuid->bytes) == sizeof(bytes));
    std::memcpy(uuid->bytes, bytes.data(), bytes.size());
    return CUDA_SUCCESS;
  });
}

CUresult DeviceTotalMem(size_t* bytes, CUdevice device) {
  return DeviceCall("cuDeviceTotalMem", device, bytes, [&](SimProcess& process) {
    *bytes = process.cards->card(device).total_bytes();
    return CUDA_SUCCESS;
  });
}

// What the cards say of themselves; anything else that CUDA knows is 0. The figures without a meaning here (clocks,
// multiprocessors, capability) are those of the H200, which the simulation is held against.
int AttributeOf(SimProcess& process, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return process.faults->Attribute("VMM").value_or(1);
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return process.faults->Attribute("POSIX_FD").value_or(1);
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      return process.faults->Attribute("HOST_REGISTER").value_or(1);
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
      return process.faults->Attribute("READONLY_PIN").value_or(1);
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 2;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return device + 1;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    default:
      return 0;
  }
}

CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return DeviceCall("cuDeviceGetAttribute", device, value, [&](SimProcess& process) {
    if (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = AttributeOf(process, attribute, device);
    return CUDA_SUCCESS;
  });
}

CUresult DevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return DeviceCall("cuDevicePrimaryCtxRetain", device, context, [&](SimProcess& process) {
    SimContext& primary = *process.contexts[device];
    const CUresult result = primary.Retain();
    if (result == CUDA_SUCCESS) *context = reinterpret_cast<CUcontext>(&primary);
    return result;
  });
}

CUresult DevicePrimaryCtxRelease(CUdevice device) {
  return SimCall("cuDevicePrimaryCtxRelease", SimNeeds::kInit, [&](SimProcess& process, SimContext*) {
    if (!IsDevice(process, device)) return CUDA_ERROR_INVALID_DEVICE;
    return process.contexts[device]->Release();
  });
}

CUresult CtxSetCurrent(CUcontext context) {
  return SimCall("cuCtxSetCurrent", SimNeeds::kInit, [&](SimProcess& process, SimContext*& current) {
    auto* wanted = reinterpret_cast<SimContext*>(context);
    const bool known = std::any_of(process.contexts.begin(), process.contexts.end(),
                                   [&](const auto& known_context) { return known_context.get() == wanted; });
    if (wanted != nullptr && (!known || !wanted->active())) return CUDA_ERROR_INVALID_CONTEXT;
    current = wanted;
    return CUDA_SUCCESS;
  });
}

CUresult CtxGetCurrent(CUcontext* context) {
  return SimCall("cuCtxGetCurrent", SimNeeds::kInit, [&](SimProcess&, SimContext* current) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
  });
}

}  // namespace

void FillSimDeviceCalls(Driver& driver) {
  driver.cuInit = Init;
  driver.cuDriverGetVersion = DriverGetVersion;
  driver.cuGetErrorName = GetErrorName;
  driver.cuGetErrorString = GetErrorString;
  driver.cuDeviceGetCount = DeviceGetCount;
  driver.cuDeviceGet = DeviceGet;
  driver.cuDeviceGetName = DeviceGetName;
  driver.cuDeviceGetUuid = DeviceGetUuid;
  driver.cuDeviceTotalMem = DeviceTotalMem;
  driver.cuDeviceGetAttribute = DeviceGetAttribute;
  driver.cuDevicePrimaryCtxRetain = DevicePrimaryCtxRetain;
  driver.cuDevicePrimaryCtxRelease = DevicePrimaryCtxRelease;
  driver.cuCtxSetCurrent = CtxSetCurrent;
  driver.cuCtxGetCurrent = CtxGetCurrent;
}

}  // namespace residency
