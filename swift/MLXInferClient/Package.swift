// swift-tools-version: 6.0
import PackageDescription

// Apple's FoundationModels exists only on Apple's systems. On Linux a module of its declarations takes its place, for the tests. It
// has the version that the sources ask for.
#if os(Linux)
    let standIns: [Target] = [
        .target(
            name: "FoundationModels", path: "Tests/FoundationModels", exclude: ["README.md"],
            swiftSettings: [.unsafeFlags(["-user-module-version", "2.0"])])
    ]
    let foundationModels: [Target.Dependency] = ["FoundationModels"]
#else
    let standIns: [Target] = []
    let foundationModels: [Target.Dependency] = []
#endif

let package = Package(
    name: "MLXInferClient",
    platforms: [.macOS(.v14)],
    products: [
        .library(name: "MLXInferClient", targets: ["MLXInferClient"]),
        .library(name: "MLXInferFoundationModels", targets: ["MLXInferFoundationModels"]),
        .executable(name: "mlxinfer-chat", targets: ["mlxinfer-chat"]),
    ],
    targets: standIns + [
        .target(name: "MLXInferClient"),
        .target(name: "MLXInferFoundationModels", dependencies: ["MLXInferClient"] + foundationModels),
        .executableTarget(name: "mlxinfer-chat", dependencies: ["MLXInferClient"]),
        .testTarget(
            name: "MLXInferClientTests", dependencies: ["MLXInferClient", "MLXInferFoundationModels", "mlxinfer-chat"] + foundationModels,
            exclude: ["Golden"]),
    ],
    swiftLanguageModes: [.v6]
)
