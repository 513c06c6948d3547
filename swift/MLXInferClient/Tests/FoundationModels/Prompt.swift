import Foundation

/// What a user says.
public struct Prompt: Sendable {
    let segments: [Transcript.Segment]
    init(segments: [Transcript.Segment]) { self.segments = segments }
    public init(_ content: some PromptRepresentable) { self = content.promptRepresentation }
    public init(@PromptBuilder _ content: () throws -> Prompt) rethrows { self = try content() }
}

public protocol PromptRepresentable {
    var promptRepresentation: Prompt { get }
}

extension Prompt: PromptRepresentable {
    public var promptRepresentation: Prompt { self }
}

@resultBuilder
public struct PromptBuilder {
    public static func buildBlock<each Part: PromptRepresentable>(_ components: repeat each Part) -> Prompt {
        var segments: [Transcript.Segment] = []
        for component in repeat each components { segments += component.promptRepresentation.segments }
        return Prompt(segments: segments)
    }
}

/// What a developer says of the conversation.
public struct Instructions: Sendable {
    let segments: [Transcript.Segment]
    init(segments: [Transcript.Segment]) { self.segments = segments }
    public init(_ content: some InstructionsRepresentable) { self = content.instructionsRepresentation }
}

public protocol InstructionsRepresentable {
    var instructionsRepresentation: Instructions { get }
}

extension Instructions: InstructionsRepresentable {
    public var instructionsRepresentation: Instructions { self }
}

/// An image in a prompt.
public struct Attachment<Content> {
    let segment: Transcript.AttachmentSegment
}

public struct ImageAttachmentContent: Sendable, Equatable {}

extension Attachment where Content == ImageAttachmentContent {
    public init(imageURL: URL) {
        segment = Transcript.AttachmentSegment(content: .image(Transcript.ImageAttachment(imageURL: imageURL)))
    }
}

extension Attachment: PromptRepresentable {
    public var promptRepresentation: Prompt { Prompt(segments: [.attachment(segment)]) }
}
