import Foundation

extension Transcript {
    public enum Segment: Sendable, Identifiable, Equatable {
        case text(TextSegment)
        case structure(StructuredSegment)
        case attachment(AttachmentSegment)
        case custom(any CustomSegment)

        public var id: String {
            switch self {
            case .text(let segment): segment.id
            case .structure(let segment): segment.id
            case .attachment(let segment): segment.id
            case .custom(let segment): segment.id
            }
        }

        public static func == (left: Segment, right: Segment) -> Bool {
            switch (left, right) {
            case (.text(let left), .text(let right)): left == right
            case (.structure(let left), .structure(let right)): left == right
            case (.attachment(let left), .attachment(let right)): left == right
            default: false
            }
        }
    }

    public struct TextSegment: Sendable, Identifiable, Equatable {
        public var id: String
        public var content: String
        public init(id: String = UUID().uuidString, content: String) { (self.id, self.content) = (id, content) }
    }

    public struct StructuredSegment: Sendable, Identifiable, Equatable {
        public var id: String
        public var source: String
        public var content: GeneratedContent
        public init(id: String = UUID().uuidString, source: String, content: GeneratedContent) {
            (self.id, self.source, self.content) = (id, source, content)
        }
    }

    public struct AttachmentSegment: Sendable, Identifiable, Equatable {
        public var id: String
        public var content: Attachment
        public var label: String?
        public init(id: String = UUID().uuidString, content: Attachment, label: String? = nil) {
            (self.id, self.content, self.label) = (id, content, label)
        }
    }

    public enum Attachment: Sendable, Equatable {
        case image(ImageAttachment)
    }

    public struct ImageAttachment: Sendable, Equatable {
        public let url: URL?
        public init(imageURL: URL) { url = imageURL }
    }

    public protocol CustomSegment: Equatable, Identifiable, Sendable {
        associatedtype Content: Codable & Equatable & Sendable
        var id: String { get }
        var content: Content { get }
    }
}
