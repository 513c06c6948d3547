import Foundation
import MLXInferClient

@testable import MenuBarChatModel

/// The words that start the real server; nil if nobody wants tests with it.
let serverProgram: [String]? = ProcessInfo.processInfo.environment["MLXINFER_COMMAND"].flatMap { line in
    let words = line.split(separator: " ").map(String.init)
    return words.isEmpty ? nil : words
}

/// A new folder that only this user may enter, as servers require for their sockets.
func freshFolder() throws -> URL {
    let folder = FileManager.default.temporaryDirectory.appendingPathComponent("mbc-\(UUID().uuidString.prefix(13))")
    try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true, attributes: [.posixPermissions: 0o700])
    return folder
}

func freshFile(_ name: String, _ content: Data) throws -> URL {
    let file = try freshFolder().appendingPathComponent(name)
    try content.write(to: file)
    return file
}

/// A picture of one pixel.
let bitmap: Data = {
    let header: [UInt8] = [0x42, 0x4D, 58, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24, 0]
    return Data(header + [UInt8](repeating: 0, count: 28))
}()

/// True if the condition holds within half a minute.
@MainActor func eventually(_ isTrue: () async throws -> Bool) async rethrows -> Bool {
    for _ in 0..<6000 {
        if try await isTrue() { return true }
        try? await Task.sleep(for: .milliseconds(5))
    }
    return false
}
