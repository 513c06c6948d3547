// swift-tools-version: 6.1
import PackageDescription

let package = Package(
    name: "MLXInferAnyLanguageModel",
    platforms: [.macOS(.v14)],
    products: [.library(name: "MLXInferAnyLanguageModel", targets: ["MLXInferAnyLanguageModel"])],
    dependencies: [
        .package(path: "../../../swift/MLXInferClient"),
        .package(url: "https://github.com/huggingface/AnyLanguageModel", from: "0.8.0"),
    ],
    targets: [
        .target(
            name: "MLXInferAnyLanguageModel",
            dependencies: ["MLXInferClient", .product(name: "AnyLanguageModel", package: "AnyLanguageModel")])
    ],
    swiftLanguageModes: [.v6]
)
