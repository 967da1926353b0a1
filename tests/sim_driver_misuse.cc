// SPDX-License-Identifier: Apache-2.0
//
// How the simulated driver stands programs that do wrong, and programs of many threads. Part of
// sim_driver_test.
#include <sys/mman.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/sim_child.h"

namespace residency {

TEST_CASE("host memory that went away ends the context and not the process") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          std::string notes;
          const CUdeviceptr address = MappedCell(cu);
          char* host = HostBytes(kCell);
          EXPECT(cu.cuMemHostRegister(host, kCell, 0) == CUDA_SUCCESS);
          EXPECT(::mprotect(host, kCell, PROT_NONE) == 0);
          EXPECT(cu.cuMemcpyHtoDAsync(address, host, kCell, nullptr) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamSynchronize(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
          return notes;
        }) == "");
}

TEST_CASE("unmapping under a running copy ends the context and not the process") {
  SimFolder folder;
  SimOptions options = Options(folder);
  options.link_bytes_per_second = 16 * kMiB;
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          const CUdeviceptr address = MappedCell(cu);
          char* host = HostBytes(kCell);
          EXPECT(cu.cuMemHostRegister(host, kCell, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemcpyHtoDAsync(address, host, kCell, nullptr) == CUDA_SUCCESS);
          EXPECT(cu.cuMemUnmap(address, kCell) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamSynchronize(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
          return notes;
        }) == "");
}

TEST_CASE("unmapping under a running kernel waits for it and ends the context") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          std::string notes;
          static std::atomic<bool> running{false};
          static std::atomic<bool> may_end{false};
          RegisterSimKernel("touch", {8}, [](const SimMemory& memory, void** params) {
            auto* bytes = static_cast<char*>(memory.Write(*static_cast<uint64_t*>(params[0]), kCell));
            running = true;
            running.notify_all();
            may_end.wait(false);
            bytes[kCell - 1] = 1;
            return CUDA_SUCCESS;
          });
          CUdeviceptr address = MappedCell(cu);
          CUmodule module;
          CUfunction function;
          void* params[] = {&address};
          EXPECT(cu.cuModuleLoadData(&module, "") == CUDA_SUCCESS);
          EXPECT(cu.cuModuleGetFunction(&function, module, "touch") == CUDA_SUCCESS);
          EXPECT(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr) == CUDA_SUCCESS);
          running.wait(false);
          std::thread unmapper([&] { EXPECT(cu.cuMemUnmap(address, kCell) == CUDA_SUCCESS); });
          may_end = true;
          may_end.notify_all();
          unmapper.join();
          uint64_t word;
          EXPECT(cu.cuMemcpyDtoHAsync(&word, address, 8, nullptr) != CUDA_SUCCESS);
          return notes;
        }) == "");
}

TEST_CASE("a kernel's parameters are those of the launch, not of later") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          std::string notes;
          static std::atomic<uint64_t> seen{0};
          static std::atomic<bool> may_start{false};
          RegisterSimKernel("note", {8, 1}, [](const SimMemory&, void** params) {
            may_start.wait(false);
            seen = *static_cast<uint64_t*>(params[0]) + *static_cast<uint8_t*>(params[1]);
            return CUDA_SUCCESS;
          });
          CUmodule module;
          CUfunction function;
          uint64_t large = 1000;
          uint8_t small = 7;
          void* params[] = {&large, &small};
          EXPECT(cu.cuModuleLoadData(&module, "") == CUDA_SUCCESS);
          EXPECT(cu.cuModuleGetFunction(&function, module, "note") == CUDA_SUCCESS);
          EXPECT(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr) == CUDA_SUCCESS);
          large = small = 0;
          may_start = true;
          may_start.notify_all();
          EXPECT(cu.cuStreamSynchronize(nullptr) == CUDA_SUCCESS);
          EXPECT(seen == 1007);
          return notes;
        }) == "");
}

TEST_CASE("a handle that was released for the last time is refused") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          std::string notes;
          const CUmemAllocationProp properties = MemoryOf(0);
          CUmemGenericAllocationHandle handle;
          CUdeviceptr address;
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemAddressReserve(&address, kCell, 0, 0, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemRelease(handle) == CUDA_SUCCESS);
          EXPECT(cu.cuMemRelease(handle) == CUDA_ERROR_INVALID_VALUE);
          EXPECT(cu.cuMemMap(address, kCell, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
          return notes;
        }) == "");
}

TEST_CASE("a stray access to a reserved address ends the process, as a fault does") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          CUdeviceptr address = 0;
          if (cu.cuMemAddressReserve(&address, kCell, 0, 0, 0) != CUDA_SUCCESS) return std::string("not reserved");
          return std::to_string(*reinterpret_cast<volatile char*>(address));
        }) == "died");
}

TEST_CASE("threads make, map, fill, read and drop cells side by side, and nothing is left over") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          CUcontext context;
          cu.cuCtxGetCurrent(&context);
          std::string notes;
          std::atomic<int> wrong{0};
          const auto work = [&](unsigned char value) {
            const CUmemAllocationProp properties = MemoryOf(0);
            std::vector<unsigned char> read(kCell);
            CUstream stream;
            wrong += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
            for (int round = 0; round < 10; ++round) {
              const CUdeviceptr address = MappedCell(cu);
              CUmemGenericAllocationHandle handle;
              int fd = -1;
              wrong += cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS;
              wrong += cu.cuMemsetD8Async(address, value, kCell, stream) != CUDA_SUCCESS;
              wrong += cu.cuMemcpyDtoHAsync(read.data(), address, kCell, stream) != CUDA_SUCCESS;
              wrong += read[0] != value || read[kCell - 1] != value;
              wrong += cu.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != CUDA_SUCCESS;
              wrong += cu.cuMemUnmap(address, kCell) != CUDA_SUCCESS;
              wrong += cu.cuMemAddressFree(address, kCell) != CUDA_SUCCESS;
              wrong += cu.cuMemRelease(handle) != CUDA_SUCCESS;
              wrong += cu.cuMemCreate(&handle, kCell, &properties, 0) != CUDA_SUCCESS;
              wrong += cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) !=
                       CUDA_SUCCESS;
              wrong += cu.cuMemRelease(handle) != CUDA_SUCCESS;
              wrong += ::close(fd) != 0;
              wrong += cu.cuStreamDestroy(stream) != CUDA_SUCCESS;
              wrong += FreeBytes(cu) > kGiB;
            }
          };
          std::vector<std::thread> threads;
          for (unsigned char value = 1; value <= 4; ++value) threads.emplace_back(work, value);
          for (std::thread& thread : threads) thread.join();
          EXPECT(wrong == 0);
          EXPECT(FreeBytes(cu) == kGiB);
          return notes;
        }) == "");
}

}  // namespace residency
