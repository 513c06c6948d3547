import Foundation
import MLXInferClient

/// A file that goes with a message: a picture or a text.
public struct Attachment: Identifiable, Sendable, Hashable {
    public let id = UUID()
    public let name: String
    public let part: ContentPart
    public var isPicture: Bool { part.text == nil }

    /// - Throws: ``MLXInferError/invalidRequest(_:)`` if the file is neither.
    public init(contentsOf file: URL) throws(MLXInferError) {
        name = file.lastPathComponent
        do {
            part = try ContentPart(contentsOf: file)
        } catch {
            guard let size = try? file.resourceValues(forKeys: [.fileSizeKey]).fileSize, size <= 200_000 else { throw error }
            guard let text = try? String(contentsOf: file, encoding: .utf8), !text.contains("\0") else { throw error }
            part = .text("\(name):\n\(text)\n")
        }
    }
}
