// swift-tools-version: 6.0
import PackageDescription

// SwiftUI exists on a Mac only. Elsewhere the package is the model behind the views, with its tests.
#if os(macOS)
    let app: [Target] = [.executableTarget(name: "MenuBarChat", dependencies: ["MenuBarChatModel"])]
#else
    let app: [Target] = []
#endif

let package = Package(
    name: "MenuBarChat",
    platforms: [.macOS(.v14)],
    dependencies: [.package(path: "../../../swift/MLXInferClient")],
    targets: app + [
        .target(name: "MenuBarChatModel", dependencies: ["MLXInferClient"]),
        .testTarget(name: "MenuBarChatModelTests", dependencies: ["MenuBarChatModel"]),
    ],
    swiftLanguageModes: [.v6]
)
