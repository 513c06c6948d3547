// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "Ask",
    platforms: [.macOS(.v14)],
    dependencies: [.package(path: "mlxinfer")],
    targets: [
        .executableTarget(name: "Ask", dependencies: [.product(name: "MLXInferClient", package: "mlxinfer")])
    ]
)
