# SPDX-License-Identifier: Apache-2.0
"""C++ code from .proto files, by Debian's protoc and grpc_cpp_plugin."""

def cc_proto(name, src, grpc = False, visibility = None):
    """A cc_library with the messages of `src`, and with its services where `grpc` is set.

    Args:
      name: of the library.
      src: one .proto file of this package.
      grpc: also generate the service's stubs.
      visibility: of the library.
    """
    stem = src[:-len(".proto")]
    outs = [stem + ".pb.h", stem + ".pb.cc"]
    plugin = ""
    if grpc:
        outs += [stem + ".grpc.pb.h", stem + ".grpc.pb.cc"]
        plugin = "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin --grpc_out=$(GENDIR) "
    native.genrule(
        name = name + "_files",
        srcs = [src],
        outs = outs,
        cmd = "/usr/bin/protoc -I. -I/usr/include --cpp_out=$(GENDIR) " + plugin + "$(location " + src + ")",
    )
    native.cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".cc")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-Wno-all", "-Wno-extra"],
        visibility = visibility,
        deps = ["@system//:grpc++"] if grpc else ["@system//:protobuf"],
    )
