// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "MLXInferClient",
    platforms: [.macOS(.v14)],
    products: [
        .library(name: "MLXInferClient", targets: ["MLXInferClient"]),
        .executable(name: "mlxinfer-chat", targets: ["mlxinfer-chat"]),
    ],
    targets: [
        .target(name: "MLXInferClient"),
        .executableTarget(name: "mlxinfer-chat", dependencies: ["MLXInferClient"]),
        .testTarget(name: "MLXInferClientTests", dependencies: ["MLXInferClient", "mlxinfer-chat"], exclude: ["Golden"]),
    ],
    swiftLanguageModes: [.v6]
)
