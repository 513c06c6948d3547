import Foundation
import Testing

@testable import MLXInferClient

struct PictureFileTests {
    private static func file(_ bytes: [UInt8], _ name: String = "p") throws -> URL {
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try Data(bytes).write(to: folder.appendingPathComponent(name))
        return folder.appendingPathComponent(name)
    }

    private static func refusal(_ file: URL) -> MLXInferError? {
        do {
            _ = try ContentPart(contentsOf: file)
            return nil
        } catch {
            return error
        }
    }

    private static let kinds: [(type: String, bytes: [UInt8])] = [
        ("image/png", [0x89, 0x50, 0x4E, 0x47, 0x0D, 0x0A, 0x1A, 0x0A]), ("image/jpeg", [0xFF, 0xD8, 0xFF, 0xE0]),
        ("image/gif", Array("GIF89a".utf8)), ("image/webp", Array("RIFF\u{10}\u{0}\u{0}\u{0}WEBPVP8 ".utf8)),
        ("image/bmp", Array("BM".utf8) + [1, 2, 3, 4, 0, 0, 0, 0, 54]),
    ]

    @Test func theFirstBytesSayTheType() throws {
        for (type, bytes) in Self.kinds {
            let part = try ContentPart(contentsOf: Self.file(bytes, "wrong.txt"), detail: .low)
            #expect(part == .attachment(data: Data(bytes), mimeType: type, detail: .low))
        }
    }

    @Test(arguments: ["", "BM", "BMW drives on", "RIFF1234WAVE", "GIF", "<svg/>"])
    func otherFilesAreRefused(_ text: String) throws {
        #expect(try Self.refusal(Self.file(Array(text.utf8))) == .invalidRequest("p is not a picture"))
    }

    @Test func whatCannotBeReadIsRefused() throws {
        let file = try Self.file(Self.kinds[0].bytes)
        #expect(Self.refusal(file.deletingLastPathComponent())?.description.contains("is not a file") == true)
        #expect(Self.refusal(file.appendingPathExtension("gone"))?.description.contains("p.gone cannot be read: ") == true)
        let handle = try FileHandle(forWritingTo: file)
        try handle.truncate(atOffset: 20_000_001)
        #expect(Self.refusal(file) == .invalidRequest("p has more than 20 MB"))
    }
}
