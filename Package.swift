// swift-tools-version: 6.0
// What SwiftPM finds when this repository is added by its URL. The targets are those of swift/MLXInferClient, which has a manifest of
// its own for work on it, with the tests and the command that tries it.
import PackageDescription

let package = Package(
    name: "mlxinfer",
    platforms: [.macOS(.v14)],
    products: [
        .library(name: "MLXInferClient", targets: ["MLXInferClient"]),
        .library(name: "MLXInferFoundationModels", targets: ["MLXInferFoundationModels"]),
    ],
    targets: [
        .target(name: "MLXInferClient", path: "swift/MLXInferClient/Sources/MLXInferClient"),
        .target(
            name: "MLXInferFoundationModels", dependencies: ["MLXInferClient"],
            path: "swift/MLXInferClient/Sources/MLXInferFoundationModels"),
    ],
    swiftLanguageModes: [.v6]
)
