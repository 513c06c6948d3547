import Foundation
import MLXInferClient
import Observation

/// A conversation of the sidebar, with the message that is being written.
@MainActor @Observable
public final class Chat: Identifiable {
    public nonisolated let id: UUID
    public let conversation: Conversation
    public var prompt = ""
    public var attachments: [Attachment] = []
    var changed: Date

    init(_ client: Client, _ stored: StoredChat = StoredChat()) {
        (id, changed) = (stored.id, stored.changed)
        conversation = Conversation(client, request: ChatRequest(stored.messages, model: stored.model))
    }

    /// The beginning of the first message.
    public var title: String {
        guard let first = conversation.messages.first(where: { $0.role == .user }) else { return "New conversation" }
        return first.content.split(whereSeparator: \.isNewline).first.map { String($0.prefix(40)) } ?? "Pictures"
    }

    public var canSend: Bool { !attachments.isEmpty || prompt.contains { !$0.isWhitespace } }
    var isEmpty: Bool { conversation.messages.isEmpty && !canSend }
    var stored: StoredChat {
        StoredChat(id: id, changed: changed, model: conversation.request.model, messages: conversation.messages)
    }
}

/// A conversation in a file.
struct StoredChat: Codable, Sendable {
    var id = UUID()
    var changed = Date()
    var model: String?
    var messages: [Message] = []
}

/// A folder with a file for each conversation.
struct ChatStore: Sendable {
    let folder: URL

    /// The conversations, latest first, and the names of files that cannot be read.
    func load() -> (chats: [StoredChat], unreadable: [String]) {
        let files = (try? FileManager.default.contentsOfDirectory(at: folder, includingPropertiesForKeys: nil)) ?? []
        var (chats, unreadable) = ([StoredChat](), [String]())
        for file in files where file.pathExtension == "json" {
            let chat = try? JSONDecoder().decode(StoredChat.self, from: Data(contentsOf: file))
            if let chat { chats.append(chat) } else { unreadable.append(file.lastPathComponent) }
        }
        return (chats.sorted { $0.changed > $1.changed }, unreadable.sorted())
    }

    func save(_ chat: StoredChat) throws {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true, attributes: [.posixPermissions: 0o700])
        try JSONEncoder().encode(chat).write(to: file(chat.id), options: .atomic)
    }

    func remove(_ id: UUID) throws {
        if FileManager.default.fileExists(atPath: file(id).path) { try FileManager.default.removeItem(at: file(id)) }
    }

    private func file(_ id: UUID) -> URL { folder.appendingPathComponent("\(id).json") }
}
