// SPDX-License-Identifier: Apache-2.0
//
// The table's functions that give streams work and wait for it.
#include <chrono>
#include <utility>

#include "mechanisms/sim_calls.h"
#include "mechanisms/sim_kernels.h"

namespace residency {
namespace {

constexpr auto kContext = SimNeeds::kContext;

// The way into a call about one stream.
template <typename Body>
CUresult StreamCall(std::string_view name, CUstream handle, Body body) {
  return SimCall(name, kContext, [&](SimProcess& process, SimContext* context) {
    const std::shared_ptr<SimStream> stream = context->FindStream(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return body(process, *context, *stream);
  });
}

// Gives the stream a copy whose host side is `host_range`. A copy of memory that is not registered returns when it is
// done, since the caller may use the memory again at once.
CUresult DoCopy(SimContext& context, SimStream& stream, SimHostRegistry::Range host_range, SimStream::Work copy) {
  if (host_range == SimHostRegistry::Range::kMixed) return CUDA_ERROR_INVALID_VALUE;
  context.Do(stream, std::move(copy));
  if (host_range != SimHostRegistry::Range::kPageable) return CUDA_SUCCESS;
  context.Mark(stream)->Wait();
  return context.health().error();
}

CUresult MemcpyHtoDAsync(CUdeviceptr device, const void* host, size_t bytes, CUstream handle) {
  return StreamCall("cuMemcpyHtoDAsync", handle, [&](SimProcess& process, SimContext& context, SimStream& stream) {
    const int card = context.card().index();
    if (bytes == 0) return CUDA_SUCCESS;
    if (host == nullptr || !process.space.Covers(device, bytes, card, SimAddressSpace::kReadWrite)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const SimHostRegistry::Range range = process.hosts.Classify(host, bytes, false);
    const bool locked_file = range == SimHostRegistry::Range::kRegisteredFile;
    return DoCopy(context, stream, range, [&process, &context, card, device, host, bytes, locked_file] {
      return SimCopyToDevice(process.space, card, context.to_device(), device, host, bytes, locked_file);
    });
  });
}

CUresult MemcpyDtoHAsync(void* host, CUdeviceptr device, size_t bytes, CUstream handle) {
  return StreamCall("cuMemcpyDtoHAsync", handle, [&](SimProcess& process, SimContext& context, SimStream& stream) {
    const int card = context.card().index();
    if (bytes == 0) return CUDA_SUCCESS;
    if (host == nullptr || !process.space.Covers(device, bytes, card, SimAddressSpace::kRead)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return DoCopy(context, stream, process.hosts.Classify(host, bytes, true),
                  [&process, &context, card, device, host, bytes] {
                    return SimCopyToHost(process.space, card, context.to_host(), host, device, bytes);
                  });
  });
}

CUresult MemsetD8Async(CUdeviceptr device, unsigned char value, size_t bytes, CUstream handle) {
  return StreamCall("cuMemsetD8Async", handle, [&](SimProcess& process, SimContext& context, SimStream& stream) {
    const int card = context.card().index();
    if (bytes == 0) return CUDA_SUCCESS;
    if (!process.space.Covers(device, bytes, card, SimAddressSpace::kReadWrite)) return CUDA_ERROR_INVALID_VALUE;
    context.Do(stream,
               [&process, card, device, value, bytes] { return SimFill(process.space, card, device, value, bytes); });
    return CUDA_SUCCESS;
  });
}

CUresult StreamCreate(CUstream* stream, unsigned int flags) {
  return SimCall("cuStreamCreate", kContext, [&](SimProcess&, SimContext* context) {
    return stream == nullptr ? CUDA_ERROR_INVALID_VALUE : context->CreateStream(flags, stream);
  });
}

CUresult StreamDestroy(CUstream stream) {
  return SimCall("cuStreamDestroy", kContext,
                 [&](SimProcess&, SimContext* context) { return context->DestroyStream(stream); });
}

CUresult StreamSynchronize(CUstream handle) {
  return StreamCall("cuStreamSynchronize", handle, [&](SimProcess&, SimContext& context, SimStream& stream) {
    context.Mark(stream)->Wait();
    return context.health().error();
  });
}

CUresult CtxSynchronize() {
  return SimCall("cuCtxSynchronize", kContext, [](SimProcess&, SimContext* context) {
    for (const auto& marker : context->MarkAll()) marker->Wait();
    return context->health().error();
  });
}

CUresult StreamQuery(CUstream handle) {
  return StreamCall("cuStreamQuery", handle, [&](SimProcess&, SimContext& context, SimStream& stream) {
    if (!stream.Idle()) return CUDA_ERROR_NOT_READY;
    return context.health().error();
  });
}

CUresult StreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
  return StreamCall("cuStreamWaitEvent", handle, [&](SimProcess&, SimContext& context, SimStream& stream) {
    SimEvent found;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult result = context.FindEvent(event, &found); result != CUDA_SUCCESS) return result;
    if (found.marker != nullptr) context.WaitFor(stream, found.marker);
    return CUDA_SUCCESS;
  });
}

CUresult StreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return StreamCall("cuStreamIsCapturing", handle, [&](SimProcess&, SimContext&, SimStream&) {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult EventCreate(CUevent* event, unsigned int flags) {
  return SimCall("cuEventCreate", kContext, [&](SimProcess&, SimContext* context) {
    constexpr unsigned int kKnownFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if ((flags & ~kKnownFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
    *event = context->CreateEvent((flags & CU_EVENT_DISABLE_TIMING) == 0);
    return CUDA_SUCCESS;
  });
}

CUresult EventDestroy(CUevent event) {
  return SimCall("cuEventDestroy", kContext,
                 [&](SimProcess&, SimContext* context) { return context->DestroyEvent(event); });
}

CUresult EventRecord(CUevent event, CUstream handle) {
  return StreamCall("cuEventRecord", handle, [&](SimProcess&, SimContext& context, SimStream& stream) {
    SimEvent found;
    if (const CUresult result = context.FindEvent(event, &found); result != CUDA_SUCCESS) return result;
    return context.SetMarker(event, context.Mark(stream));
  });
}

CUresult EventQuery(CUevent event) {
  return SimCall("cuEventQuery", kContext, [&](SimProcess&, SimContext* context) {
    SimEvent found;
    if (const CUresult result = context->FindEvent(event, &found); result != CUDA_SUCCESS) return result;
    if (found.marker != nullptr && !found.marker->reached()) return CUDA_ERROR_NOT_READY;
    return context->health().error();
  });
}

CUresult EventSynchronize(CUevent event) {
  return SimCall("cuEventSynchronize", kContext, [&](SimProcess&, SimContext* context) {
    SimEvent found;
    if (const CUresult result = context->FindEvent(event, &found); result != CUDA_SUCCESS) return result;
    if (found.marker != nullptr) found.marker->Wait();
    return context->health().error();
  });
}

CUresult EventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  return SimCall("cuEventElapsedTime", kContext, [&](SimProcess&, SimContext* context) {
    SimEvent first, last;
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (context->FindEvent(begin, &first) != CUDA_SUCCESS || context->FindEvent(end, &last) != CUDA_SUCCESS ||
        !first.timing || !last.timing || first.marker == nullptr || last.marker == nullptr) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!first.marker->reached() || !last.marker->reached()) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last.marker->time() - first.marker->time()).count();
    return CUDA_SUCCESS;
  });
}

CUresult ModuleLoadData(CUmodule* module, const void*) {
  return SimCall("cuModuleLoadData", kContext, [&](SimProcess&, SimContext* context) {
    if (module == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *module = context->LoadModule();
    return CUDA_SUCCESS;
  });
}

CUresult ModuleUnload(CUmodule module) {
  return SimCall("cuModuleUnload", kContext,
                 [&](SimProcess&, SimContext* context) { return context->UnloadModule(module); });
}

CUresult ModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return SimCall("cuModuleGetFunction", kContext, [&](SimProcess&, SimContext* context) {
    if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!context->HasModule(module)) return CUDA_ERROR_INVALID_HANDLE;
    const SimKernelEntry* entry = FindSimKernel(name);
    if (entry == nullptr) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(const_cast<SimKernelEntry*>(entry));
    return CUDA_SUCCESS;
  });
}

CUresult LaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                      unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int, CUstream handle,
                      void** params, void** extra) {
  return StreamCall("cuLaunchKernel", handle, [&](SimProcess& process, SimContext& context, SimStream& stream) {
    const auto* entry = reinterpret_cast<const SimKernelEntry*>(function);
    if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const uint64_t threads = uint64_t{block_x} * block_y * block_z;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (params == nullptr && !entry->param_bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
    const int card = context.card().index();
    context.Do(stream, [&process, entry, card, copies = CopySimParams(*entry, params)] {
      return RunSimKernel(*entry, copies, process.space, card);
    });
    return CUDA_SUCCESS;
  });
}

}  // namespace

void FillSimStreamCalls(Driver& driver) {
  driver.cuMemcpyHtoDAsync = MemcpyHtoDAsync;
  driver.cuMemcpyDtoHAsync = MemcpyDtoHAsync;
  driver.cuMemsetD8Async = MemsetD8Async;
  driver.cuStreamCreate = StreamCreate;
  driver.cuStreamDestroy = StreamDestroy;
  driver.cuStreamSynchronize = StreamSynchronize;
  driver.cuCtxSynchronize = CtxSynchronize;
  driver.cuStreamQuery = StreamQuery;
  driver.cuStreamWaitEvent = StreamWaitEvent;
  driver.cuStreamIsCapturing = StreamIsCapturing;
  driver.cuEventCreate = EventCreate;
  driver.cuEventDestroy = EventDestroy;
  driver.cuEventRecord = EventRecord;
  driver.cuEventQuery = EventQuery;
  driver.cuEventSynchronize = EventSynchronize;
  driver.cuEventElapsedTime = EventElapsedTime;
  driver.cuModuleLoadData = ModuleLoadData;
  driver.cuModuleUnload = ModuleUnload;
  driver.cuModuleGetFunction = ModuleGetFunction;
  driver.cuLaunchKernel = LaunchKernel;
}

}  // namespace residency
